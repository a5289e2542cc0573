"""Measures the parts of a step's period, and the capacity of one coordinator.

    python -m benchmarks.rounds                 both
    python -m benchmarks.rounds --only time     real workers without Ray, the target's own clock
    python -m benchmarks.rounds --only capacity null workers in one process

Time: the target reports for every step the time since the one before, and the coordinator keeps the
last few hundred reports.

  forward      the model
  draw         draws and walks: the step minus its forward
  drafting     the residents' turn, their calls alone
  outside      everything else of the period: mail, choice of nodes, verdicts, learning

`benchmarks.rounds.period` measures the same with a forward of a known time.  HTTP is not part of a
step; `benchmarks.overhead` measures it on a running server.

Capacity: see `benchmarks/rounds/capacity.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rounds.capacity import Frames, Load, costs, parts, profile, run
from benchmarks.support.answers import Law
from benchmarks.support.by_hand import Ours, Setup
from benchmarks.support.options import add_hand_options, numbers, parser_of, words
from benchmarks.support.prompts import Prompt, prompts
from benchmarks.support.record import OUT, show_report
from cluster.config.file import load
from cluster.core import token_array
from cluster.rpc.codec_target import VERDICT
from cluster.text.stream import TextStream
from cluster.text.tokenizer import Tokenizer

_CODEC_FRAMES = 20
# Parts of the coordinator's work, by the function that does them.
_PARTS = {
    "take in verdicts, commit": ("coordinator/relay.py", "take"),
    "merge the pool's trees": ("coordinator/pool_trees.py", "_merge"),
    "take in proposals": ("coordinator/drafters.py", "receive"),
    "tell drafters": ("coordinator/replica.py", "_next_frame"),
    "settle: metrics and scores": ("coordinator/step_log.py", "settle"),
}


def shares(steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the parts of the time between two steps, as medians in milliseconds.

    steps: entries of `StepLog.recent_steps`.
    """

    def median_ms(values: list[float]) -> float:
        return round(1e3 * statistics.median(values), 3)

    return {
        "steps": len(steps),
        "draft nodes per step, mean": round(
            statistics.mean(each["num_nodes"] for each in steps), 2
        ),
        "period": median_ms([each["period_s"] for each in steps]),
        "forward": median_ms([each["forward_time_s"] for each in steps]),
        "draw": median_ms([each["step_time_s"] - each["forward_time_s"] for each in steps]),
        "drafting": median_ms([each["draft_time_s"] for each in steps]),
        "outside": median_ms(
            [each["period_s"] - each["step_time_s"] - each["draft_time_s"] for each in steps]
        ),
    }


def codec_time_s(frames: Frames) -> float:
    """Mean CPU seconds to encode and decode the frame of a step's verdicts."""
    start = time.process_time()
    for verdict in frames:
        for data in VERDICT.encode(verdict):
            VERDICT.decode(data)
    return (time.process_time() - start) / len(frames)


def _codec_of(num_sequences: int) -> float:
    _, frames = asyncio.run(
        run(Load(num_sequences=num_sequences, num_rounds=_CODEC_FRAMES), keep_frames=True)
    )
    return codec_time_s(frames)


def detokenise_time_s(tokenizer: Tokenizer, texts: Sequence[Sequence[int]]) -> float:
    """Mean CPU seconds per event of three tokens."""
    streams = [TextStream(tokenizer) for _ in texts]
    events = 0
    start = time.process_time()
    for stream, ids in zip(streams, texts, strict=True):
        for first in range(0, len(ids), 3):
            stream.push(token_array(ids[first : first + 3]))
            events += 1
    return (time.process_time() - start) / max(events, 1)


def measure_time(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run real workers without Ray, per sampling setting and concurrency."""
    from transformers import AutoTokenizer

    overrides = (f"target.engine.model={arguments.target}", *arguments.overrides)
    config = load(arguments.config, overrides).config
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as logs:
        names = tuple(arguments.drafters or config.drafters)
        setup = Setup(
            arguments.config, overrides, names, cores, Path(logs), by_task=not arguments.drafters
        )
        ours = Ours(setup)
        try:
            ours.start()
            for concurrency in arguments.concurrency:
                asked = prompts(max(concurrency, arguments.prompts), tokenizer, ["code", "prose"])
                for law in arguments.laws:
                    name = f"{law.name}, concurrency {concurrency}"
                    report[name] = _time_of(ours, asked, arguments, law, concurrency)
        finally:
            ours.stop()
    report["detokenise, per event of three tokens, ms"] = round(
        1e3
        * detokenise_time_s(
            Tokenizer.load(arguments.target), [prompt.token_ids for prompt in asked]
        ),
        4,
    )
    return report


def _time_of(
    ours: Ours,
    asked: Sequence[Prompt],
    arguments: argparse.Namespace,
    law: Law,
    concurrency: int,
) -> dict[str, Any]:
    ours.run(asked, 4, law, concurrency, seed=0)  # fills the prefix cache
    ours.run(asked, arguments.max_tokens, law, concurrency, seed=1)
    # The ring buffer also has steps from before and from the warm-up.  Only full batches count;
    # after the ring has wrapped, all of them are from this run.
    recent = ours.status()["recent_steps"][-arguments.max_tokens :]
    full = [each for each in recent if each["num_sequences"] == concurrency]
    if not full:
        return {"steps": 0, "why": "no step had the whole batch"}
    return shares(full)


def measure_capacity(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure fixed and adaptive budget, each with its profile."""
    report: dict[str, Any] = {}
    for budget in ("fixed", "adaptive"):
        asked = Load(
            num_sequences=arguments.sequences,
            num_rounds=arguments.rounds,
            num_drafters=arguments.num_drafters,
            budget=budget,
        )
        runs = [asyncio.run(run(asked))[0] for _ in range(arguments.repetitions)]
        middle = sorted(runs, key=lambda each: each.committed_tokens / each.coordinator_cpu_s)
        profiled = profile(asked)
        report[f"{budget} budget"] = {
            **middle[len(middle) // 2].report(),
            "runs": len(runs),
            "top costs": costs(profiled),
            "shares of the coordinator's time, nested": parts(profiled, _PARTS),
        }
    codec_s = _codec_of(arguments.sequences)
    report["codec of the verdicts, both ends, ms per step"] = round(1e3 * codec_s, 3)
    return report


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add_hand_options(parser)
    add = parser.add_argument
    add("--only", choices=["time", "capacity"])
    add("--drafters", type=words, help="default: those of each task")
    add("--concurrency", type=numbers, default=[1, 8, 32])
    add("--prompts", type=int, default=8)
    add("--max-tokens", type=int, default=96)
    add("--sequences", type=int, default=256, help="of the capacity")
    add("--rounds", type=int, default=100, help="of the capacity, per run")
    add("--num-drafters", type=int, default=1, help="of the capacity")
    add("--repetitions", type=int, default=3, help="of the capacity; the median run is reported")
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    report: dict[str, Any] = {}
    if arguments.only != "capacity":
        report["where a step's time goes, medians in ms"] = measure_time(arguments)
    if arguments.only != "time":
        report["capacity with null workers"] = measure_capacity(arguments)
    show_report(OUT / "rounds/rounds.json", report)


if __name__ == "__main__":
    main()
