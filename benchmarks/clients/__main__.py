"""Checks that third-party clients work unchanged, each against one started server.

Coding agents do a task of theirs against a model that is a script, behind an ingress of their own.

    python -m benchmarks.clients                          every client, as `make test-clients` does
    python -m benchmarks.clients --only openai lm_eval    some of them; the others keep their rows
    python -m benchmarks.clients --vllm /path/to/python   also `vllm bench serve`, from there

Every client has an environment of its own below --venvs, with the versions of `plan.py`.  A command
that exceeds its time limit is ended with everything that it started.  Exits with 1 if a check
failed for which `plan.py` has no explanation.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.clients.agents import row_of_agent
from benchmarks.clients.environments import Environments
from benchmarks.clients.plan import CLIENTS, Setting
from benchmarks.clients.report import publish, read_rows
from benchmarks.clients.running import Row, rows_of
from benchmarks.support.options import add_options, parser_of
from benchmarks.support.processes import exit_on_sigterm, free_ports
from benchmarks.support.record import OUT, ROOT
from benchmarks.support.serving import running
from cluster.config.file import load
from cluster.models.resolve import resolve
from tests.support.agents.plan import AGENTS


def main() -> None:
    parser = parser_of(__doc__)
    add_options(
        parser,
        config="configs/local.yaml",
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides")
    add_options(
        parser,
        url=(str, "a server of that configuration, instead of starting one"),
    )
    names = [one.name for one in (*CLIENTS, *AGENTS)]
    parser.add_argument("--only", nargs="+", choices=names)
    add_options(
        parser,
        venvs=ROOT / "build" / "clients",
        vllm=(Path, "interpreter of an environment with vllm"),
        out=OUT / "clients" / "clients.json",
    )
    options = parser.parse_args()
    exit_on_sigterm()
    rows = dict(read_rows(options.out))
    environments = Environments(options.venvs, options.vllm)
    chosen = options.only or names
    config = load(options.config, options.overrides).config
    settings = {"config": options.config, "model": config.model_name}

    def note(name: str, found: list[Row]) -> None:
        # After each client, so that an interrupted run keeps its results.
        rows[name] = found
        for row in found:
            print(name, row.version, row.check, row.result, row.note, flush=True)
        publish(options.out, {one: rows[one] for one in names if one in rows}, settings)

    with tempfile.TemporaryDirectory() as work:
        for agent in AGENTS:
            if agent.name in chosen:
                note(agent.name, [row_of_agent(agent, environments, Path(work) / agent.name)])
        clients = [client for client in CLIENTS if client.name in chosen]
        if clients:
            # A client must find the tokenizer's folder: the server's model may be a name.
            tokenizer = resolve(config.target.engine.model, only_tokenizer=True)
            ports = unused_ports()
            with running(options.config, [*ports, *options.overrides], options.url) as server:
                for client in clients:
                    place = Path(work) / client.name
                    setting = Setting(server.url, server.model(), tokenizer, place)
                    note(client.name, rows_of(client, environments, setting))
    sys.exit(any(row.is_failure for name in chosen for row in rows[name]))


def unused_ports() -> list[str]:
    """Return settings with unused ports, because another server may run beside this one."""
    names = ("http", "grpc", "dashboard")
    return [f"{name}.port={port}" for name, port in zip(names, free_ports(3), strict=True)]


if __name__ == "__main__":
    main()
