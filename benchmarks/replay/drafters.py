"""Measures drafters along a target's answers: tokens per step and the truth of their claims.

    python -m benchmarks.replay.drafters QUESTIONS --config configs/local.yaml --drafters lm
    python -m benchmarks.replay.drafters QUESTIONS --config configs/local.yaml \\
        --laws greedy t0.7 t1,p0.9 t1,k10

QUESTIONS: Spec-Bench's JSONL.  The target answers some questions of each task under each law; then
each drafter is led along the answers alone, in rounds: it grows its tree without a time limit, and
the answer says which of its best nodes are accepted.  So the figures depend on no machine's speed.
The same command goes on where it was interrupted.

Calibration error: mean |claimed survival - share accepted| of all verified nodes, over ten bins of
the claim (Naeini et al. 2015).  The claims are the drafter's own; the coordinator corrects them
further.

Bars, for greedy answers: 2.2 tokens per step with trees of 8 nodes, averaged over the tasks, and an
error of at most 0.05.  Exit status 1 if a drafter misses one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.replay.along import Recording, ReplayStats, replay
from benchmarks.replay.record import created, write_texts
from benchmarks.spec_bench import questions as spec_bench
from benchmarks.support.options import add_config_options, add_options, parser_of, sampling
from benchmarks.support.page import head, number, row
from benchmarks.support.record import OUT, Record, rows
from cluster.config.file import load
from cluster.config.schema import Config
from cluster.core import Proposal

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


def replayed(config: Config, name: str, texts: Sequence[Recording], nodes: int) -> dict[str, Any]:
    """Lead a new drafter along all texts, in their order."""
    drafter = created(config, name, nodes)
    by_task: dict[str, ReplayStats] = {}
    claims = Claims()
    for index, text in enumerate(tqdm(texts, desc=name, file=sys.stderr)):
        stats = replay(drafter, text, nodes, request_id=str(index), judge=claims.judge)
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


def table(laws: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Tokens per step: a row for each law, a column for each drafter."""
    names = list(next(iter(laws.values())))
    lines = head(["law", *names])
    for law, report in laws.items():
        lines.append(row([law, *(number(report[name]["tokens per step"], 2) for name in names)]))
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("questions", type=Path)
    add_config_options(parser, "configs/local.yaml")
    add("--drafters", nargs="+", help="default: all of the configuration")
    add("--laws", nargs="+", default=["greedy"], help="greedy, t0.7, t0.7,p0.9,k50 ...")
    add_options(
        parser,
        per_task=(5, "questions of each task"),
        max_tokens=128,
        nodes=(8, "of each tree"),
        fresh=(False, "forget what was measured before"),
        out=OUT / "replay" / "drafters.json",
    )
    arguments = parser.parse_args(words)
    config = load(arguments.config, arguments.overrides).config
    chosen = spec_bench.limit(spec_bench.load(arguments.questions), arguments.per_task)
    settings = {
        "target": config.target.engine.model,
        "questions": f"{len(chosen)}, {arguments.per_task} of each task",
        "max_tokens": arguments.max_tokens,
        "nodes": arguments.nodes,
        "drafters": arguments.drafters or list(config.drafters),
    }
    record = Record(arguments.out, settings, fresh=arguments.fresh)
    for name in arguments.laws:
        if name not in record.results:
            written = write_texts(config, chosen, [sampling(name, arguments.max_tokens)])
            found = {
                each: replayed(config, each, written, arguments.nodes)
                for each in settings["drafters"]
            }
            record.add(name, found)
    report = record.results
    print(rows(record.publish(report)))
    print(table(report))
    lines = missed(report.get("greedy", {}))
    for line in lines:
        print(f"missed: {line}", file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
