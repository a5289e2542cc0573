"""The command line of `drafthouse`: its verbs and their options."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from cluster.errors import ConfigError
from cluster.options import api_key
from deployments import gpus, plan_command, vllm_options
from deployments.asked import DEMONSTRATION
from deployments.evaluate import command as evaluate_command

# Verbs whose module has their options and runs them; it is imported for them alone.
MODULES = {
    "bench": ("deployments.bench.command", "load a server and say how fast it answers"),
    "chat": ("deployments.chat_command", "talk with a model in the terminal"),
    "top": ("deployments.top_command", "watch a server's figures live"),
    "try": ("deployments.try_command", "ask a server one question, with drafts and without"),
    "train": ("cluster.train.cli", "train drafters of a chat model, or the demonstration models"),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the list of all options before it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def _version() -> str:
    try:
        return importlib.metadata.version("drafthouse")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed, run from its sources)"


def module_of(verb: str) -> ModuleType:
    return importlib.import_module(MODULES[verb][0])


def parser_for(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of a command line; `train`'s options are known to that of `train` alone."""
    parser = _Parser(prog="drafthouse", description="A serving cluster for speculative decoding.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    serve = verbs.add_parser("serve", help="start the cluster and serve until Ctrl-C")
    _add_file(serve)
    serve.add_argument(
        "--api-key",
        type=api_key,
        nargs="+",
        default=[],
        help="what clients must send; see also access.keys_file",
    )
    serve.add_argument(
        "--log-format", choices=("text", "json"), help="of every process, as log_format"
    )
    serve.add_argument(
        "--address", help="join a running Ray cluster (`auto` or HOST:PORT) instead of starting one"
    )
    check = verbs.add_parser("check", help="check a configuration and print the plan")
    _add_file(check)
    gpus.configure(check)
    check.add_argument("--json", action="store_true", help="print it as one JSON object")
    forecast = verbs.add_parser(
        "plan", help="say what memory a configuration takes, and what its drafts should bring"
    )
    _add_file(forecast)
    plan_command.configure(forecast)
    trial = verbs.add_parser("evaluate", help="measure where drafts pay, and whose")
    _add_file(trial, nargs=None)
    evaluate_command.configure(trial)
    applied = verbs.add_parser(
        "apply", help="let a running `serve` take what can change live, or refuse it by its key"
    )
    _add_file(applied)
    diff = verbs.add_parser("diff", help="say what each changed key of a configuration restarts")
    diff.add_argument("old", metavar="OLD", help="the file that is served")
    diff.add_argument("new", metavar="NEW", help="the file that is to be applied")
    simulate = verbs.add_parser(
        "simulate", help="say what a fleet would do and cost, by its drafters per target"
    )
    simulate.add_argument("file", metavar="FILE", help="fleet, prices and load: docs/simulate.md")
    key = verbs.add_parser("key", help="make a key for a client of access.keys_file")
    key.add_argument("name", help="of whom or what it is for")
    verbs.add_parser("models", help="list the models that are known by name")
    fetch_one = verbs.add_parser("fetch", help="get a model; prints the folder it lies in")
    fetch_one.add_argument(
        "name", help="one of `drafthouse models`, owner/name[@revision] on the hub, or a GGUF file"
    )
    completion = verbs.add_parser(
        "completion", help="print what lets a shell complete this command; docs/serving.md"
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    for verb, (_, about) in MODULES.items():
        added = verbs.add_parser(verb, help=about)
        # torch takes seconds to import: only for the verb that needs it.
        if argv[:1] == [verb] or (verb != "train" and "_ARGCOMPLETE" in os.environ):
            module_of(verb).configure(added)
    return parser


def _add_file(parser: argparse.ArgumentParser, nargs: str | None = "?") -> None:
    """nargs: None where one must be named."""
    about = (
        "a Ray Serve config file, or a model: a folder, a GGUF file, owner/name on the hub, or one "
        f"of `drafthouse models`; without any {DEMONSTRATION}, the demonstration"
    )
    parser.add_argument("file", metavar="FILE|MODEL", nargs=nargs, help=about)
    vllm_options.add_options(parser)
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting, e.g. target.engine.dtype=float32 or http.port=8123",
    )
