"""Compares speculative decoding of one request at a time with the ceiling that its drafts allow.

    python -m benchmarks.ceiling --target work/grown-231m

The replay ceiling: the target's texts are recorded, the drafters are replayed along them without a
time limit, their trees are merged, and the best N nodes are verified in every round.  If only the
target's steps took time, speculative decoding would be

    max over N of  tokens per round(N) * T(1) / T(1 + N)

times as fast as plain decoding, where T(rows) is the step time that the target measured at
start.  It is compared with the measured speedup: the same texts, with prompts in the prefix cache,
each decoded for the first time, over plain decoding in separate processes.

Bar: at least 0.85 of the ceiling, greedy.  Exit status 1 if missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.answers import Answer, Law
from benchmarks.by_hand import Ours, Setup, add_hand_options
from benchmarks.prompts import Prompt, prompts
from benchmarks.serving import write_report
from cluster.config import Config
from cluster.config_file import load
from cluster.core import Commit, DraftTask, Observation, Proposal, SamplingParams, token_array
from cluster.draft.base import Drafter, DrafterContext
from cluster.draft.registry import create
from cluster.draft.replay import Recording, ReplayStats, replay
from cluster.messages import WorkerDescription
from cluster.spec.merge_trees import merge
from cluster.spec.step_profile import StepProfile
from cluster.spec.tree import prune

_MIN_SHARE = 0.85
_SEED = 7


class MergedDrafters:
    """Several drafters as one: merges their trees with equal weight and proposes the best nodes.

    Each drafter may draft as many nodes as are verified.
    """

    needs_hidden_states = False

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters
        self._newest: dict[int, Proposal] = {}

    def observe(self, commits: Sequence[Commit]) -> list[Observation]:
        self._newest.clear()
        return [drafter.observe(commits) for drafter in self._drafters][0]  # noqa: RUF015 - all

    def propose(self, tasks: Sequence[DraftTask]) -> list[Proposal]:
        (task,) = tasks
        fresh = {
            place: proposals[-1]
            for place, drafter in enumerate(self._drafters)
            if (proposals := drafter.propose(tasks))
        }
        if not fresh:
            return []
        self._newest |= fresh
        newest = list(self._newest.values())
        merged = merge([each.tree for each in newest], [each.survival for each in newest])
        tree, survival, _ = prune(merged.tree, merged.survival, task.max_nodes)
        last = newest[-1]
        return [
            Proposal(
                last.request_id, last.generation, last.base_len, last.prefix_hash, tree, survival,
                "together",
            )
        ]  # fmt: skip

    def release(self, request_ids: Sequence[str]) -> None:
        for drafter in self._drafters:
            drafter.release(request_ids)


def ceiling(tokens_per_round: dict[int, float], profile: StepProfile) -> tuple[int, float]:
    """(the best number of nodes, its speedup over plain decoding)."""
    gains = {
        nodes: tokens * float(profile.at([1])[0] / profile.at([1 + nodes])[0])
        for nodes, tokens in tokens_per_round.items()
    }
    best = max(gains, key=lambda nodes: gains[nodes])
    return best, gains[best]


def tokens_per_second(answers: Sequence[Answer]) -> float:
    """Decoded tokens per second, for answers decoded one after the other."""
    decoded = sum(answer.decode_tokens for answer in answers)
    return decoded / sum(answer.decode_s for answer in answers)


def _replayed(
    config: Config,
    names: Sequence[str],
    target: WorkerDescription,
    recordings: Sequence[Recording],
    nodes: int,
) -> ReplayStats:
    """Replay all recordings in order with new drafters."""
    drafters = [
        create(
            name,
            config.drafters[name],
            DrafterContext(name, nodes, 1, target.vocab_size, target.tokenizer_hash),
        )
        for name in names
    ]
    stats = ReplayStats()
    for index, recording in enumerate(recordings):
        stats += replay(MergedDrafters(drafters), recording, nodes, request_id=str(index))
    return stats


@contextmanager
def _running(
    arguments: argparse.Namespace, overrides: Sequence[str], names: Sequence[str]
) -> Iterator[Ours]:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as logs:
        ours = Ours(Setup(arguments.config, tuple(overrides), tuple(names), cores, Path(logs)))
        try:
            ours.start()
            yield ours
        finally:
            ours.stop()


def _ask(
    ours: Ours, asked: Sequence[Prompt], max_tokens: int, law: Law, turn: int
) -> Sequence[Answer]:
    """Ask part `turn` of the prompts, a different one each time, whose texts no drafter knows."""
    ours.run(asked, 1, law, 1, seed=_SEED)  # fills the prefix cache
    return ours.run(asked, max_tokens, law, 1, seed=_SEED + turn).answers


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    overrides = (f"target.engine.model={arguments.target}", *arguments.overrides)
    config = load(arguments.config, overrides).config
    names = tuple(arguments.drafters)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    count = arguments.prompts
    asked = prompts(count * (arguments.runs + 1), tokenizer, arguments.kinds)
    parts = [asked[turn * count : (turn + 1) * count] for turn in range(arguments.runs + 1)]
    report: dict[str, Any] = {}
    for law in arguments.laws:
        recordings: list[Recording] = []
        gains: list[float] = []
        with (
            _running(arguments, overrides, ()) as plain,
            _running(arguments, overrides, names) as ours,
        ):
            target = plain.describe_target()
            for turn, part in enumerate(parts):
                texts = _ask(plain, part, arguments.max_tokens, law, turn)
                drafted = _ask(ours, part, arguments.max_tokens, law, turn)
                if turn:  # the first turn is the warm-up
                    gains.append(tokens_per_second(drafted) / tokens_per_second(texts))
                    recordings += _recordings(part, texts, law, arguments.max_tokens, turn)
        profile = StepProfile.of(target.step_rows, target.step_times_s)
        if profile is None:
            raise RuntimeError("the target has not measured its steps; set its profile_steps")
        found = {
            nodes: _replayed(config, names, target, recordings, nodes).mean_acceptance_length
            for nodes in arguments.nodes
        }
        best, most = ceiling(found, profile)
        report[law.name] = {
            "texts": len(recordings),
            "tokens per round by nodes": {nodes: round(each, 3) for nodes, each in found.items()},
            "step by nodes, of a plain one": {
                nodes: round(float(profile.at([1 + nodes])[0] / profile.at([1])[0]), 3)
                for nodes in arguments.nodes
            },
            "best nodes": best,
            "ceiling, of plain": round(most, 3),
            "gain, of plain, median of runs": round(statistics.median(gains), 3),
            "runs": [round(gain, 3) for gain in gains],
            "gain over ceiling": round(statistics.median(gains) / most, 3),
        }
    return report


def _recordings(
    part: Sequence[Prompt], texts: Sequence[Answer], law: Law, max_tokens: int, turn: int
) -> list[Recording]:
    return [
        Recording(
            token_array(prompt.token_ids),
            token_array(text.token_ids),
            SamplingParams(
                temperature=law.temperature,
                seed=(_SEED + turn) * 1_000_003 + index,
                max_tokens=max_tokens,
            ),
            prompt.task,
        )
        for index, (prompt, text) in enumerate(zip(part, texts, strict=True))
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_hand_options(parser)
    add = parser.add_argument
    add("--drafters", type=lambda text: text.split(","), default=["lm", "suffix"])
    add("--kinds", type=lambda text: text.split(","), default=["code", "prose"])
    add("--prompts", type=int, default=8, help="per run")
    add("--runs", type=int, default=5)
    add("--max-tokens", type=int, default=64)
    add("--nodes", type=lambda text: [int(n) for n in text.split(",")],
        default=[1, 2, 3, 4, 6, 8, 12, 16])  # fmt: skip
    report = measure(parser.parse_args(argv))
    write_report("ceiling", report)
    share = report.get("greedy", {}).get("gain over ceiling", _MIN_SHARE)
    if share < _MIN_SHARE:
        print(f"missed: greedy gains {share} of the ceiling, bar {_MIN_SHARE}", file=sys.stderr)
    return int(share < _MIN_SHARE)


if __name__ == "__main__":
    sys.exit(main())
