"""Compares `drafthouse simulate` with a small cluster that runs.

    python -m benchmarks.simulate docs/benchmarks/simulate/texts.npz

The cluster: two targets, two drafters and a coordinator, each in its process; only the devices are
fake.  A target's steps take the time of a profile, asleep, and write recorded texts; a drafter
offers what a recorded one offered, at a set speed.  Streams ask again as soon as they are answered.
The simulator is given the same profile, speeds and recording, and what a step takes outside of the
forward by docs/benchmarks/rounds/period.json.  Exit status 1 if a load differs by more than 15 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.simulate.fake_drafter import PASS_S, FakeOptions
from benchmarks.simulate.fake_target import ROWS, SEATS, TIMES_MS
from benchmarks.simulate.recording import Recording
from benchmarks.support.answers import Answer
from benchmarks.support.by_hand import complete
from benchmarks.support.options import numbers, parser_of
from benchmarks.support.processes import PinnedProcess, exit_on_sigterm
from benchmarks.support.record import OUT, Record
from cluster.core import Request, SamplingParams, SpeculationOptions
from cluster.rpc.channel import connect_coordinator
from cluster.simulate import report, settings

BAR = 0.15
NUM_TARGETS = NUM_DRAFTERS = 2
_CORES = (0, 1)
_OPTIONS = FakeOptions()
# A tree waits half a pass on average until it is offered, and a round on the wire takes 2 ms.
_DELAY_MS = 1e3 * PASS_S / 2.0 + 2.0


def _served(recording: Path) -> dict[str, Any]:
    """Return the Serve configuration of the cluster, for it and for the simulator."""
    drafter = {
        "kind": "benchmarks.simulate.fake_drafter:FakeDrafter", "max_requests": 256,
        "placement": {"num_cpus": 1}, "replicas": NUM_DRAFTERS,
        "options": {"recording": str(recording.resolve()), "drafter": _OPTIONS.drafter},
    }  # fmt: skip
    arguments = {
        "target": {"engine": {"model": "models/demo-target", "max_running_sequences": SEATS}},
        "drafters": {_OPTIONS.drafter: drafter},
        "coordinator": {"max_running_sequences": 2 * SEATS},
    }
    return {"applications": [{"name": "fake", "args": arguments}]}


def _simulated(outside: Sequence[float], streams: int, is_drafted: bool) -> dict[str, Any]:
    return {
        "config": "serve.yaml", "recording": "texts.npz",
        "target": {
            "replicas": NUM_TARGETS, "rows": list(ROWS), "times_ms": list(TIMES_MS),
            "outside_ms": outside[0], "outside_per_text_ms": outside[1],
        },
        "drafter": {
            "nodes_per_s": _OPTIONS.nodes_per_s, "texts": _OPTIONS.texts, "delay_ms": _DELAY_MS,
        },
        "load": {"streams": streams}, "ratios": [NUM_DRAFTERS / NUM_TARGETS if is_drafted else 0],
    }  # fmt: skip


def _outside(*, is_drafted: bool) -> tuple[float, float]:
    """Return what a step takes beside its forward, and for each text, by the record of periods."""
    periods = json.loads((OUT / "rounds" / "period.json").read_text("utf-8"))
    drafts = "with" if is_drafted else "without"
    one, many = (
        periods[f"asleep, {size} texts, {drafts} drafts"]["outside, ms"] for size in (1, 32)
    )
    per_text = (many - one) / 31.0
    return one - per_text, per_text


class _Cluster:
    """The processes; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[PinnedProcess] = []
        self.address = ""

    def __enter__(self) -> _Cluster:
        config, recording = str(self._folder / "serve.yaml"), str(self._folder / "texts.npz")
        targets = [
            self._start("benchmarks.simulate.fake_target", recording, "--name", f"target-{number}")
            for number in range(NUM_TARGETS)
        ]
        name = _OPTIONS.drafter
        drafters = [
            self._start("cluster.worker", "draft", config, name, "--log-level", "WARNING")
            for _ in range(NUM_DRAFTERS)
        ]
        words = [word for each in targets for word in ("--target", _ready(each))]
        words += [word for each in drafters for word in ("--drafter", f"{name}={_ready(each)}")]
        lead = self._start("cluster.lead", config, *words, "--log-level", "WARNING")
        self.address = _ready(lead)
        time.sleep(2.0)  # until all processes have joined
        return self

    def __exit__(self, *error: object) -> None:
        for process in reversed(self._processes):
            process.stop()

    def _start(self, *words: str) -> PinnedProcess:
        log = self._folder / f"{len(self._processes)}.log"
        self._processes.append(PinnedProcess([sys.executable, "-m", *words], _CORES, log))
        return self._processes[-1]


def _ready(process: PinnedProcess) -> str:
    while " ready: " not in (line := process.read_line()):
        continue
    return line.partition(" ready: ")[2].strip()


async def _asked(
    address: str, recording: Recording, streams: int, seconds: float, is_drafted: bool
) -> dict[str, float]:
    """Let streams ask for about so many seconds."""
    tokens_s = 1.5 / (1e-3 * TIMES_MS[0])  # a stream's, more or less
    mean_len = statistics.mean(len(text.token_ids) for text in recording.texts)
    count = max(streams * seconds * tokens_s / mean_len, 3 * streams)
    # Every text about equally often, as in a simulation that lasts longer.
    order = np.random.default_rng(streams).permutation(len(recording.texts))
    count = len(order) * math.ceil(2.0 * count / len(order)) // 2
    requests = []
    for index in range(count):
        number = int(order[index % len(order)])
        params = SamplingParams(temperature=0.0, max_tokens=len(recording.texts[number].token_ids))
        requests.append(Request(
            f"{streams}-{is_drafted}-{index}", recording.prompt(number), params,
            speculation=SpeculationOptions(enabled=is_drafted),
        ))  # fmt: skip
    _, link = await connect_coordinator(address)
    try:
        result = await complete(link, requests, streams)
    finally:
        await link.close()
    for index, answer in enumerate(result.answers):
        expected = recording.texts[int(order[index % len(order)])].token_ids
        if list(answer.token_ids) != expected.tolist():
            raise RuntimeError(f"text {index} differs from the recorded one")
    found = _figures(result.answers)
    if result.acceptance is not None:
        acceptance = result.acceptance
        found["tokens per step"] = round(1.0 + acceptance.accepted / acceptance.steps, 3)
    return found


def _figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the figures of the time until the last submission."""
    begin, end = answers[0].submitted_s, max(each.submitted_s for each in answers)
    num_tokens = 0
    for answer in answers:
        former = 0
        for at, so_far in answer.events:
            num_tokens += (so_far - former) * (begin <= at < end)
            former = so_far
    counted = [each for each in answers if each.events[-1][0] < end] or list(answers)
    tpot_s = [each.decode_s / max(each.decode_tokens, 1) for each in counted]
    return {
        "tokens/s": round(num_tokens / (end - begin), 1),
        "TTFT p50, ms": round(1e3 * statistics.median(each.ttft_s for each in counted), 1),
        "TPOT p50, ms": round(1e3 * statistics.median(tpot_s), 2),
    }


def _simulate(folder: Path, streams: int, is_drafted: bool) -> dict[str, float]:
    path = folder / "simulate.yaml"
    path.write_text(
        yaml.safe_dump(_simulated(_outside(is_drafted=is_drafted), streams, is_drafted)), "utf-8"
    )
    (row,) = report.rows(settings.read(path))
    return {
        "tokens/s": round(row.outcome.tokens_per_s, 1),
        "TTFT p50, ms": round(row.percentiles_ms("ttft_s")[0], 1),
        "TPOT p50, ms": round(row.percentiles_ms("tpot_s")[0], 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("recording", type=Path)
    add("--streams", type=numbers, default=[1, 4, 16, 32])
    add("--seconds", type=float, default=8.0, help="of each load, about")
    add("--drafts", choices=["without", "with"], nargs="*", default=["without", "with"])
    add("--fresh", action="store_true", help="forget what was measured before")
    add("--out", type=Path, default=OUT / "simulate" / "simulate.json")
    options = parser.parse_args(arguments)
    exit_on_sigterm()
    recording = Recording.read(options.recording)
    fixed = {"recording": options.recording.name, "seconds": options.seconds}
    record = Record(options.out, fixed, fresh=options.fresh)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts.npz").write_bytes(options.recording.read_bytes())
        (folder / "serve.yaml").write_text(yaml.safe_dump(_served(folder / "texts.npz")), "utf-8")
        for drafts in options.drafts:
            _measure(options, record, recording, folder, drafts)
        for key, found in record.results.items():
            streams, is_drafted = int(key.split()[0]), key.endswith("with drafts")
            found["simulated"] = _simulate(folder, streams, is_drafted)
            speeds = [found[name]["tokens/s"] for name in ("simulated", "measured")]
            found["difference"] = round(speeds[0] / speeds[1] - 1.0, 3)
    print(json.dumps(record.publish(record.results), indent=2))
    return int(any(abs(each["difference"]) > BAR for each in record.results.values()))


def _measure(
    options: argparse.Namespace, record: Record, recording: Recording, folder: Path, drafts: str
) -> None:
    """Measure the loads that the record lacks."""
    keys = {streams: f"{streams} streams, {drafts} drafts" for streams in options.streams}
    missing = [streams for streams, key in keys.items() if key not in record.results]
    if not missing:
        return
    with _Cluster(folder) as cluster:
        for streams in missing:
            asked = _asked(cluster.address, recording, streams, options.seconds, drafts == "with")
            record.add(keys[streams], {"measured": asyncio.run(asked)})


if __name__ == "__main__":
    sys.exit(main())
