"""Judges the inference of task classes: how many texts are put down to their own after 64 tokens.

    python -m benchmarks.replay.tasks TEXTS [--json OUT]

First artificial profiles, which say nothing about any drafter: three classes with a specialist
each, whose nodes are right with 0.5 plus a lead in its own class and with 0.5 elsewhere, and texts
of no class, in which all three are as in a foreign one.  Beside them the ceiling: the rule that is
right most often of all, which knows these distributions, and that every text has a class.  Then
TEXTS, recorded by `benchmarks.replay.record`: each text without its class, with all the others as
examples.

Exit status 1 if fewer than 85 % of the texts with a class are put down to it with a lead of 0.3.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cluster.core import DEFAULT_TASK
from cluster.plan.task_inference import NUM_JUDGED, TaskInference
from cluster.plan.texts import Text
from cluster.simulate.texts import RecordedText, load
from cluster.spec.acceptance import Group
from cluster.spec.token_log import TokenLog
from cluster.spec.tree import prune, walk

NUM_TOKENS = 64
BAR, LEAD_OF_BAR = 0.85, 0.3
_CLASSES = ("code", "maths", "letters")
_LEADS = (0.1, 0.2, 0.3, 0.4)
_RIGHT_ANYWHERE = 0.5
_EXAMPLES, _EXAMPLE_TOKENS = 40, 128
_WARM_UP, _JUDGED = 20, 100  # rounds of texts without a class

# The drafter, the place of its tree, and the accepted of its best nodes.
Seen = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Found:
    """Shares of the texts.  right: put down to their class; wrong: to another one; none_right: of
    the texts of no class, those left alone.  gain: accepted tokens a step by which a specialist
    leads, in the artificial profiles; ceiling: texts whose own class is the likeliest of the three
    by the true distributions, so no rule puts down more of them."""

    name: str
    is_artificial: bool
    num_texts: int
    right: float
    wrong: float
    none_right: float | None = None
    gain: float | None = None
    ceiling: float | None = None


def artificial(lead: float, seeds: Sequence[int] = range(3)) -> Found:
    outcomes: list[tuple[str, str]] = []
    likeliest: list[tuple[str, str]] = []
    for seed in seeds:
        generator, inference = np.random.default_rng(seed), TaskInference(_CLASSES)
        for _ in range(_EXAMPLES):
            for task in _CLASSES:
                seen = _written(generator, task, lead, _EXAMPLE_TOKENS)
                inferred(inference, (task, False), seen)
        for turn in range(_WARM_UP + _JUDGED):
            for task in (*_CLASSES, *[DEFAULT_TASK] * len(_CLASSES)):
                seen = list(_written(generator, task, lead, NUM_TOKENS))
                found = inferred(inference, (DEFAULT_TASK, False), seen)
                if turn >= _WARM_UP:
                    outcomes.append((task, found))
                    likeliest.append((task, _likeliest(seen, lead)))
    own = [(task, found) for task, found in outcomes if task != DEFAULT_TASK]
    none = [found for task, found in outcomes if task == DEFAULT_TASK]
    return Found(
        f"lead {lead:.1f}", True, len(outcomes),
        float(np.mean([task == found for task, found in own])),
        float(np.mean([found not in (task, DEFAULT_TASK) for task, found in own])),
        float(np.mean([found == DEFAULT_TASK for found in none])),
        _accepted(_RIGHT_ANYWHERE + lead) - _accepted(_RIGHT_ANYWHERE),
        float(np.mean([task == found for task, found in likeliest if task != DEFAULT_TASK])),
    )  # fmt: skip


def _likeliest(seen: Sequence[Seen], lead: float) -> str:
    """Return the class that explains a text best.

    The classes differ in their own specialist alone, so its outcomes decide: each accepted node
    speaks for the lead, and each node that ended a chain against it."""

    def ratio(drafter: str) -> float:
        own = [accepted for name, _, accepted in seen if name == drafter]
        ended = sum(accepted < NUM_JUDGED for accepted in own)
        right, elsewhere = _RIGHT_ANYWHERE + lead, _RIGHT_ANYWHERE
        return sum(own) * math.log(right / elsewhere) + ended * math.log(
            (1.0 - right) / (1.0 - elsewhere)
        )

    return max(_CLASSES, key=ratio)


def _accepted(right: float) -> float:
    """The mean accepted of a chain, each node of which is right with this probability."""
    return float(sum(right**depth for depth in range(1, NUM_JUDGED + 1)))


def _written(generator: np.random.Generator, task: str, lead: float, length: int) -> Iterator[Seen]:
    """A text of that length, by steps with the best of the drafters' chains."""
    position, next_steps = 0, dict.fromkeys(_CLASSES, 0)
    while position < length:
        longest = 0
        for drafter in _CLASSES:
            right = _RIGHT_ANYWHERE + (lead if drafter == task else 0.0)
            accepted = int(np.cumprod(generator.random(NUM_JUDGED) < right).sum())
            if position >= next_steps[drafter]:
                next_steps[drafter] = position + accepted + 1
                yield drafter, position, accepted
            longest = max(longest, accepted)
        position += longest + 1


def inferred(inference: TaskInference, group: Group, seen: Iterator[Seen] | Sequence[Seen]) -> str:
    """Enter a text; returns the class that it is put down to."""
    text = Text("r", group, TokenLog())
    for drafter, _, accepted in seen:
        inference.learn(text, drafter, accepted)
    return text.group[0]


def recorded(texts: Sequence[RecordedText], num_rounds: int = 2) -> Found:
    """Leave out one text at a time."""
    seen = [list(_along(text)) for text in texts]
    outcomes = []
    for place, text in enumerate(texts):
        inference = TaskInference(sorted({each.task for each in texts}))
        for _ in range(num_rounds):
            for other, own in enumerate(seen):
                if other != place:
                    inferred(inference, (texts[other].task, texts[other].is_sampled), own)
        known = [each for each in seen[place] if each[1] < NUM_TOKENS]
        outcomes.append((text.task, inferred(inference, (DEFAULT_TASK, text.is_sampled), known)))
    return Found(
        "recorded", False, len(outcomes),
        float(np.mean([task == found for task, found in outcomes])),
        float(np.mean([found not in (task, DEFAULT_TASK) for task, found in outcomes])),
    )  # fmt: skip


def _along(text: RecordedText) -> Iterator[Seen]:
    """The drafters' trees along a text, by steps with the best nodes of all of them."""
    position, next_steps = 0, dict.fromkeys(text.trees, 0)
    while position < len(text.token_ids) - 1:
        longest = 0
        for drafter, trees in text.trees.items():
            best, _, _ = prune(*trees.at(position), NUM_JUDGED)
            _, accepted = walk(best, text.token_ids[position : position + NUM_JUDGED])
            if position >= next_steps[drafter]:
                next_steps[drafter] = position + accepted + 1
                yield drafter, position, accepted
            longest = max(longest, accepted)
        position += longest + 1


def row(found: Found) -> str:
    none, ceiling = (
        "" if each is None else f"{each:.0%}" for each in (found.none_right, found.ceiling)
    )
    gain = "" if found.gain is None else f"{found.gain:.2f}"
    kind = " (artificial)" if found.is_artificial else ""
    return (
        f"| {found.name}{kind} | {gain} | {found.num_texts} | {found.right:.0%} "
        f"| {ceiling} | {found.wrong:.0%} | {none} |"
    )


HEADER = (
    "| texts | specialist's lead, tokens a step | number | right | ceiling | of a wrong class "
    "| of no class, left alone |\n|" + "---|" * 7
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.replay.tasks", description=__doc__)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--json", type=Path, help="write all that was found there")
    options = parser.parse_args(arguments)
    by_lead: Mapping[float, Found] = {lead: artificial(lead) for lead in _LEADS}
    found = [*by_lead.values(), recorded(load(options.texts))]
    print(HEADER)
    for each in found:
        print(row(each))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return int(by_lead[LEAD_OF_BAR].right < BAR)


if __name__ == "__main__":
    raise SystemExit(main())
