"""What one NVIDIA GPU does with this engine, without Ray and without a network.

    benchmarks/gpu/run.sh            all parts, within nine minutes
    benchmarks/gpu/run.sh --tiny     the same code on a CPU, in seconds; its figures mean nothing

The parts, those first that are worth most:

    environment  versions, driver, clocks, copy bandwidth
    kernels      layers, attention and draws against their references, and their times
    self_check   distances and bounds of the engine's check at load, of 20 random models
    plain        Llama 3.1's 8B of random weights, at batches to 128, in CUDA graphs and eagerly
    head         an EAGLE-3-shaped head with synthetic acceptance, 8 / 16 / 60 nodes
    sampled      temperature 0.6 with top_p 0.9
    memory       what is reserved for steps, against what they took
    trace        a step's kernels by name, and the gaps between them
    nccl         all-reduces in a world of one inside a CUDA graph

Each runs in a process of its own and has a time limit.  The record is written whenever a row is
measured: docs/benchmarks/gpu/DEVICE.{json,md}, or below --out.  What fails is in it, with its
traceback, and the run goes on; it ends with 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks.gpu.part import Row, run
from benchmarks.gpu.report import markdown
from benchmarks.support.options import add_options, parser_of
from benchmarks.support.processes import exit_on_sigterm
from benchmarks.support.record import OUT, ROOT, asked_of_gpu, write_report
from cluster.records import frozen

_BUDGET_S = 540.0
# Under which no part is worth starting: a process takes so long to be ready.
_LEAST_S = 10.0
_LINES_KEPT = 40  # of what a part that failed said last


@frozen
class Part:
    """limit_s: so long at most."""

    name: str
    limit_s: float


# Their limits are more than the budget together: what one leaves, the next ones have.
PARTS = (
    Part("environment", 60),
    Part("kernels", 120),
    Part("self_check", 100),
    Part("plain", 180),
    Part("head", 150),
    Part("sampled", 80),
    Part("memory", 80),
    Part("trace", 80),
    Part("nccl", 60),
)


class Record:
    """Of the whole run, as it is so far."""

    def __init__(self, out: Path, *, tiny: bool) -> None:
        device = "cpu" if tiny else gpu_name() or "gpu"
        self.path = out / f"{'-'.join(device.lower().replace('/', ' ').split())}.json"
        self.parts: dict[str, Row] = {}
        self._began = time.monotonic()
        self._head = {"device": device, "tiny": tiny}

    @property
    def left_s(self) -> float:
        return _BUDGET_S - (time.monotonic() - self._began)

    @property
    def has_failures(self) -> bool:
        return any("failed" in part for part in self.parts.values())

    def save(self) -> None:
        seconds = round(time.monotonic() - self._began, 1)
        report = write_report(self.path, {**self._head, "seconds": seconds, "parts": self.parts})
        self.path.with_suffix(".md").write_text(markdown(report), "utf-8")

    def run(self, part: Part, *, tiny: bool) -> None:
        """Run a part and record it; whatever happens to its process is recorded too."""
        found: Row = {"rows": []}
        self.parts[part.name] = found
        if self.left_s < _LEAST_S:
            found["failed"] = "no time was left"
            self.save()
            return
        limit_s = min(part.limit_s, self.left_s)
        began = time.monotonic()
        with tempfile.NamedTemporaryFile() as log:
            with _started(part, log.name, tiny=tiny) as (process, rows):
                for row in _received(rows, began + limit_s):
                    found["rows"].append(row)
                    _say(f"{part.name}: {_brief(row)}")
                    self.save()
                has_ended = time.monotonic() >= began + limit_s
                if not has_ended:
                    process.join(max(began + limit_s - time.monotonic(), 0.0))
                status = process.exitcode
            found["seconds"] = round(time.monotonic() - began, 1)
            failed = [each["failed"] for each in found["rows"] if "failed" in each]
            if failed:
                found["failed"] = f"{len(failed)} rows, {failed[0]}"
            if status != 0:
                found["failed"] = _reason(status, limit_s)
                said = Path(log.name).read_text("utf-8", "replace").replace(f"{ROOT}/", "")
                found["log"] = said.splitlines()[-_LINES_KEPT:]
        if "failed" in found:
            _say(f"{part.name} FAILED: {found['failed']}")
        self.save()


@contextlib.contextmanager
def _started(part: Part, log: str, *, tiny: bool) -> Iterator[tuple[BaseProcess, Connection]]:
    """A part's process and its rows; it and what it started have ended afterwards."""
    # A fork is ready at once, but the driver of a GPU may be in use in what it is a fork of.
    context = multiprocessing.get_context("forkserver" if tiny else "spawn")
    if tiny:
        multiprocessing.set_forkserver_preload(["benchmarks.gpu.target"])
    ours, theirs = context.Pipe(duplex=False)
    arguments = {"tiny": tiny, "log": log, "rows": theirs}
    process = context.Process(target=run, args=(part.name,), kwargs=arguments)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def _received(rows: Connection, deadline: float) -> Iterator[Row]:
    """The rows until their process ends, or the time."""
    with contextlib.suppress(EOFError, OSError):
        while rows.poll(max(deadline - time.monotonic(), 0.0)):
            yield rows.recv()


def _reason(status: int | None, limit_s: float) -> str:
    if status is None:
        return f"it was ended after {limit_s:.0f} s"
    if status < 0:
        return f"its process ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


def gpu_name() -> str:
    """The first GPU's, "" without one."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return asked_of_gpu("name")
    return ""


def _brief(row: Row) -> str:
    figures = {name: value for name, value in row.items() if name != "traceback"}
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in figures.items()
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_options(
        parser,
        tiny=(False, "sizes for a CPU"),
        parts=([each.name for each in PARTS], "those to run, with commas between them"),
        out=OUT / "gpu",
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.parts) - {each.name for each in PARTS})
    if unknown:
        parser.error(f"there is no part {unknown[0]}")
    if not arguments.tiny and not gpu_name() and not Path("/dev/nvidia0").exists():
        parser.error("there is no NVIDIA GPU here; --tiny runs the same path on a CPU")
    return arguments


def main() -> None:
    arguments = _arguments()
    exit_on_sigterm()
    if arguments.tiny:
        # Of all processes, before any imports Triton; and threads gain nothing at these sizes.
        os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    record = Record(arguments.out, tiny=arguments.tiny)
    for part in PARTS:
        if part.name in arguments.parts:
            record.run(part, tiny=arguments.tiny)
    print(record.path)
    sys.exit(record.has_failures)


if __name__ == "__main__":
    main()
