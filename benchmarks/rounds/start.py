"""Measures a start of `drafthouse serve`: the seconds until a request for one token is answered,
and the CPU seconds that all its processes have used by then.

    python -m benchmarks.rounds.start --config configs/tiny.yaml --starts 5 --before ../former

--before: another checkout, whose starts take turns with this one's.  Of both, the models have
passed a former start.  The same command continues an interrupted run.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.support.options import add_config_options, parser_of
from benchmarks.support.processes import cpu_s, exit_on_sigterm
from benchmarks.support.record import OUT, ROOT, Record
from benchmarks.support.serving import child_processes, running

# Of a command line, what a process is called in the record.
_KNOWN = re.compile(
    r"Replica:\w+:([\w-]+)|(ServeController)|(gcs_server|raylet/raylet|\w+Agent|log_monitor|monitor)"
    r"|(dashboard/dashboard)|(deployments\.\w+)"
)


def name_of(command_line: str) -> str:
    """What a process does, by its command line: a deployment, a daemon of Ray's, or the command."""
    found = _KNOWN.search(command_line)
    return found[found.lastindex or 0] if found else "others"


def start_once(root: Path, config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Start the server of the checkout at `root` once."""
    began = time.perf_counter()
    with running(config, overrides, root=root) as server:
        request = {"model": server.model(), "prompt": "Once upon a time", "max_tokens": 1}
        httpx.post(f"{server.url}/v1/completions", json=request, timeout=60).raise_for_status()
        first_token_s = time.perf_counter() - began
        used: Counter[str] = Counter({"deployments.cli": cpu_s(server.process_id)})
        for process_id, command_line in child_processes(server.process_id):
            used[name_of(command_line)] += cpu_s(process_id)
    return {"first_token_s": first_token_s, "cpu_s": used.total(), "processes": dict(used)}


def summary(starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The medians and the extremes of several starts."""
    names = {name for each in starts for name in each["processes"]}
    medians = {
        n: statistics.median(each["processes"].get(n, 0.0) for each in starts) for n in names
    }
    return {
        "starts": len(starts),
        **{key: _range([each[key] for each in starts]) for key in ("first_token_s", "cpu_s")},
        "cpu_s_by_process": {
            name: round(value, 2) for name, value in sorted(medians.items(), key=lambda e: -e[1])
        },
    }  # fmt: skip


def _range(values: Sequence[float]) -> list[float]:
    return [round(of(values), 2) for of in (min, statistics.median, max)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add_config_options(parser)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--most", type=int, default=100, help="starts of this run")
    arguments = parser.parse_args(argv)
    exit_on_sigterm()
    roots = {"now": ROOT} | ({"before": arguments.before.resolve()} if arguments.before else {})
    name = f"start-{Path(arguments.config).stem}.json"
    settings = {"config": arguments.config, "overrides": arguments.overrides}
    record = Record(OUT / "rounds" / name, settings)
    keys = [f"{which} {number}" for number in range(arguments.starts) for which in roots]
    for key in [key for key in keys if key not in record.results][: arguments.most]:
        which = key.partition(" ")[0]
        record.add(key, start_once(roots[which], arguments.config, arguments.overrides))
    found = {
        which: [each for key, each in record.results.items() if key.startswith(which)]
        for which in roots
    }
    told = record.publish({which: summary(starts) for which, starts in found.items() if starts})
    print(told["summary"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
