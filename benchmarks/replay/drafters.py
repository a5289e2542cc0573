"""Measures drafters along a target's greedy answers: tokens per step and the truth of their claims.

    python -m benchmarks.replay.drafters QUESTIONS --config configs/local.yaml --drafters lm

QUESTIONS: Spec-Bench's JSONL.  The target answers some questions of each task; then each drafter is
led along the answers alone, in rounds: it grows its tree without a time limit, and the answer says
which of its best nodes are accepted.  So the figures depend on no machine's speed.

Calibration error: mean |claimed survival - share accepted| of all verified nodes, over ten bins of
the claim (Naeini et al. 2015).  The claims are the drafter's own; the coordinator corrects them
further.

Bars: 2.2 tokens per step with trees of 8 nodes, averaged over the tasks, and an error of at most
0.05.  Exit status 1 if a drafter misses one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.replay.along import Recording, ReplayStats, replay
from benchmarks.replay.record import write_texts
from benchmarks.spec_bench import questions as spec_bench
from benchmarks.support.record import OUT, show_report
from cluster.config.file import load
from cluster.config.schema import Config
from cluster.core import Proposal, Request
from cluster.draft import registry
from cluster.draft.base import DrafterContext

_MIN_TOKENS_PER_STEP = 2.2
_MAX_ERROR = 0.05
_NUM_BINS = 10


@dataclass(slots=True)
class Claims:
    """Survivals that a drafter claimed for verified nodes, and the outcomes of these nodes."""

    claimed: list[float] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)

    def judge(self, proposal: Proposal, last: int) -> None:
        """`last`: the tree's last accepted node, -1 = none."""
        path = set()
        while last >= 0:
            path.add(last)
            last = int(proposal.tree.parents[last])
        self.claimed += proposal.survival.tolist()
        self.accepted += [node in path for node in range(len(proposal.tree))]

    def error(self) -> float:
        """The calibration error; nan without a node."""
        claimed, accepted = np.array(self.claimed), np.array(self.accepted, dtype=float)
        if len(claimed) == 0:
            return float("nan")
        bins = np.minimum((claimed * _NUM_BINS).astype(int), _NUM_BINS - 1)
        return float(np.abs(np.bincount(bins, claimed - accepted)).sum() / len(claimed))


def replayed(config: Config, name: str, texts: Sequence[Request], nodes: int) -> dict[str, Any]:
    """Lead a new drafter along all texts, in their order."""
    drafter = registry.create(name, config.drafters[name], DrafterContext(name, nodes, 1))
    by_task: dict[str, ReplayStats] = {}
    claims = Claims()
    for index, text in enumerate(tqdm(texts, desc=name, file=sys.stderr)):
        recording = Recording(text.prompt_ids, text.output_ids, text.params, text.task)
        stats = replay(drafter, recording, nodes, request_id=str(index), judge=claims.judge)
        by_task[text.task] = by_task.get(text.task, ReplayStats()) + stats
    lengths = {task: stats.mean_acceptance_length for task, stats in by_task.items()}
    return {
        "tokens per step": round(float(np.mean(list(lengths.values()))), 3),
        "calibration error": round(claims.error(), 4),
        "nodes": len(claims.claimed),
        "steps": sum(stats.num_rounds for stats in by_task.values()),
        "tokens per step by task": {task: round(each, 3) for task, each in lengths.items()},
    }


def missed(report: dict[str, dict[str, Any]]) -> list[str]:
    """One line for each bar that a drafter misses."""
    lines = []
    for name, figures in report.items():
        tokens, error = figures["tokens per step"], figures["calibration error"]
        if not tokens >= _MIN_TOKENS_PER_STEP:
            lines.append(f"{name}: {tokens} tokens per step, bar {_MIN_TOKENS_PER_STEP}")
        if not error <= _MAX_ERROR:
            lines.append(f"{name}: calibration error {error}, bar {_MAX_ERROR}")
    return lines


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.replay.drafters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("questions", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--drafters", nargs="+", help="default: all of the configuration")
    parser.add_argument("--per-task", type=int, default=5, help="questions of each task")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=8, help="of each tree")
    parser.add_argument("--out", type=Path, default=OUT / "replay" / "drafters.json")
    arguments = parser.parse_args(words)
    config = load(arguments.config).config
    chosen = spec_bench.limit(spec_bench.load(arguments.questions), arguments.per_task)
    written = write_texts(config, chosen, (0.0,), arguments.max_tokens)
    texts = [text for text, _ in written]
    report = {
        name: replayed(config, name, texts, arguments.nodes)
        for name in arguments.drafters or config.drafters
    }
    settings = {
        "target": config.target.engine.model,
        "questions": f"{len(texts)}, {arguments.per_task} of each task",
        "max_tokens": arguments.max_tokens,
        "nodes": arguments.nodes,
    }
    show_report(arguments.out, {"settings": settings, "drafters": report})
    for line in missed(report):
        print(f"missed: {line}", file=sys.stderr)
    return int(bool(missed(report)))


if __name__ == "__main__":
    sys.exit(main())
