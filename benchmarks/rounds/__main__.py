"""Measures the parts of a round's time, and the capacity of one coordinator.

    python -m benchmarks.rounds                 both
    python -m benchmarks.rounds --only time     real workers without Ray, the product's clocks
    python -m benchmarks.rounds --only capacity null workers in one process

Time: the coordinator stamps every decode round and keeps the last few hundred (`RoundTimes`); each
verdict of the target reports its wait, step time and forward time.

  wait         verify frame at the target, until its step began
  forward      the model
  draw         draw and walk: the step minus its forward
  wire, codec  the round trip minus the above, both ways
  drafts       the wait for drafts that the budget has planned
  coordinator  from the last verdict to the next frame, minus drafts: commit, re-root, merge, budget

The codec's part is measured by encoding and decoding frames of the same batch size; the rest is the
wire.  The shares of merge and budget in the coordinator's CPU time are reported with the capacity,
which has the profile.  HTTP is not part of a round; `benchmarks.overhead` measures it on a running
server.

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
from cluster.config_file import load
from cluster.core import token_array
from cluster.rpc.codec_target import VERDICT, VERIFY
from cluster.text.stream import TextStream
from cluster.text.tokenizer import Tokenizer

_CODEC_FRAMES = 20
# Parts of the coordinator's round, by the function that does them.
_PARTS = {
    "take in verdicts, commit": ("coordinator/rounds.py", "take"),
    "form the batch": ("coordinator/rounds.py", "_form_batch"),
    "of it: plan (re-root, merge, budget)": ("coordinator/controller.py", "plan"),
    "of it: re-root, calibrate, merge": ("spec/merge_trees.py", "merge_trees"),
    "of it: budget": ("coordinator/step_choice.py", "plan"),
    "take in proposals": ("coordinator/drafters.py", "receive"),
    "tell drafters": ("coordinator/replica.py", "_next_frame"),
    "settle: metrics and scores": ("coordinator/round_log.py", "settle"),
}


def shares(rounds: Sequence[Mapping[str, float]], codec_s: float) -> dict[str, Any]:
    """The parts of the time between two frames, medians over rounds in milliseconds.

    rounds: of `RecentRounds.report`.  codec_s: codec time of a round, both frames, both ends.
    """

    def median_ms(values: list[float]) -> float:
        return round(1e3 * statistics.median(values), 3)

    transit = [each["round_trip_s"] - each["queue_time_s"] - each["step_time_s"] for each in rounds]
    return {
        "rounds": len(rounds),
        "sequences per round, mean": round(
            statistics.mean(each["num_sequences"] for each in rounds), 2
        ),
        "draft nodes per round, mean": round(
            statistics.mean(each["num_nodes"] for each in rounds), 2
        ),
        "wait": median_ms([each["queue_time_s"] for each in rounds]),
        "forward": median_ms([each["forward_time_s"] for each in rounds]),
        "draw": median_ms([each["step_time_s"] - each["forward_time_s"] for each in rounds]),
        "codec": round(1e3 * codec_s, 3),
        "wire": round(1e3 * (statistics.median(transit) - codec_s), 3),
        "drafts": median_ms([each["waited_s"] for each in rounds]),
        "coordinator": median_ms([each["coordinator_s"] - each["waited_s"] for each in rounds]),
        "all but the forward": median_ms([each["outside_s"] for each in rounds]),
        "the same, less bought waits": median_ms(
            [each["outside_s"] - each["waited_s"] for each in rounds]
        ),
    }


def codec_time_s(frames: Frames) -> float:
    """Mean CPU seconds to encode and decode a verify frame and its verdict frame."""
    start = time.process_time()
    for verify, verdict in frames:
        for data in VERIFY.encode(verify):
            VERIFY.decode(data)
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
                codec_s = _codec_of(concurrency)
                for law in arguments.laws:
                    name = f"{law.name}, concurrency {concurrency}"
                    report[name] = _time_of(ours, asked, arguments, law, concurrency, codec_s)
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
    codec_s: float,
) -> dict[str, Any]:
    ours.run(asked, 4, law, concurrency, seed=0)  # fills the prefix cache
    ours.run(asked, arguments.max_tokens, law, concurrency, seed=1)
    # The ring buffer also has rounds from before and from the warm-up.  Only full batches count;
    # after the ring has wrapped, all of them are from this run.
    recent = ours.status()["recent_rounds"][-arguments.max_tokens :]
    full = [each for each in recent if each["num_sequences"] == concurrency]
    if not full:
        return {"rounds": 0, "why": "no round had the whole batch"}
    return shares(full, codec_s)


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
    report["codec, both frames and both ends, ms per round"] = round(1e3 * codec_s, 3)
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
        report["where a round's time goes, medians in ms"] = measure_time(arguments)
    if arguments.only != "time":
        report["capacity with null workers"] = measure_capacity(arguments)
    show_report(OUT / "rounds/rounds.json", report)


if __name__ == "__main__":
    main()
