"""Compares several verifiers of one text with one, without a clock.

    python -m benchmarks.replay.dsi TEXTS [--machines gpu] [--places own-2,own-8]

One text at a time, drafters on a device of their own.  With several verifiers (Timor et al. 2024,
"Distributed speculative inference") the drafter follows its own best path and does not wait for
verdicts: each further verifier checks a tree behind the best path of the tree before it.  A verdict
counts if that path came true; otherwise it is dropped.  One verifier is as the product has it:
trees grow while it verifies, and what continues the committed text is kept; or it waits for them.

All doubt is decided in favour of several verifiers: what is dropped is cancelled at once, and every
copy of the target knows every text.  The number of nodes is the best for each of both, chosen
afterwards.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.replay.grid import FIXED, LAWS, PLACES
from benchmarks.replay.machines import MACHINES
from benchmarks.replay.rivals import Fixed, merged
from cluster.core import FloatArray, TokenArray, TokenTree
from cluster.simulate.replay import Adaptive, Policy, Simulation
from cluster.simulate.texts import RecordedText, load
from cluster.simulate.world import Machine, Pool, Source
from cluster.spec.tree import children, reroot, walk

NUM_VERIFIERS = (1, 2, 4, 8)
# It is built if it brings so much.
BAR = 1.3
_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Line:
    """One text's drafter and verifiers.

    num_nodes: of each tree that is verified.  rate: nodes that the drafter grows per second.
    latency_s: from a verdict to the first nodes after it.
    """

    machine: Machine
    source: Source
    num_verifiers: int
    num_nodes: int
    rate: float
    latency_s: float

    def time_s(self, text: RecordedText) -> float:
        """Return the seconds in which the output is written, without reading the prompt."""
        now, position, kept = 0.0, 0, 0
        free_at = [0.0] * self.num_verifiers
        while position < len(text.token_ids):
            now, position, kept = self._run(text, now, position, kept, free_at)
            free_at = [min(each, now) for each in free_at]  # what they still do is of no use
        return now

    def _run(
        self, text: RecordedText, now: float, position: int, kept: int, free_at: list[float]
    ) -> tuple[float, int, int]:
        """Draft and verify until a verdict ends what goes on ahead of it.

        kept: nodes that the drafter has at `position`.  Returns the three values after it."""
        drafted_at, delta = now + self.latency_s, 1
        verdict = (math.inf, position, kept)
        while True:
            tree, survival = self.source.best(text, position, self.num_nodes)
            drafted_at += max(len(tree) - kept, 0) / self.rate
            began_at = max(drafted_at if len(tree) else now, min(free_at))
            if began_at >= verdict[0]:
                return verdict
            ended_at = began_at + self.machine.step_s(delta + len(tree), 1)
            free_at[free_at.index(min(free_at))] = ended_at
            rest, path = text.token_ids[position:], best_path(tree, survival)
            emitted = min(walk(tree, rest)[1] + 1, len(rest))
            found = reroot(tree, rest[:emitted])
            verdict = ended_at, position + emitted, len(found.tree) if found.hit else 0
            is_right = np.array_equal(path, rest[: len(path)])
            if not (len(path) and is_right) or emitted == len(rest):
                return verdict
            position, delta = position + len(path), len(path)
            kept = len(reroot(tree, path).tree)


def best_path(tree: TokenTree, survival: FloatArray) -> TokenArray:
    """Return the tokens from the root along the child that promises most."""
    below, found = children(tree.parents), list[int]()
    while following := below[found[-1] + 1 if found else 0]:
        found.append(max(following, key=lambda node: float(survival[node])))
    return tree.token_ids[found]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Speeds in plain decoding's, each with its best number of nodes.

    one: of one verifier; its nodes are 0 if the controller chose them step by step.
    several: by number of verifiers.
    """

    one: tuple[float, int]
    several: dict[int, tuple[float, int]]

    @property
    def gain(self) -> float:
        """The best of several verifiers, in the speed of one."""
        return max(speed for speed, _ in self.several.values()) / self.one[0]


def judge(
    texts: Sequence[RecordedText],
    machine: Machine,
    rate: float,
    verifiers: Sequence[int] = NUM_VERIFIERS,
    seconds: float = _SECONDS,
) -> Outcome:
    """Play texts of one law.  rate: nodes per second.  seconds: of virtual time, for one verifier
    as the product has it."""
    texts = [replace(text, prompt_len=1) for text in texts]
    source = merged(tuple(texts[0].trees))
    pool = Pool({"merged": source}, remote=frozenset({"merged"}), nodes_per_s=rate)
    simulation = Simulation(texts, machine, pool, 1)
    policies: dict[int, Policy] = {0: Adaptive(machine, pool)}
    policies |= {count: Fixed(count) for count in FIXED}
    ones = [(simulation.run(each, seconds).speed, count) for count, each in policies.items()]
    plain_s = machine.step_s(1, 1) * sum(len(text.token_ids) for text in texts)
    found: dict[int, tuple[float, int]] = {}
    for count in verifiers:
        speeds = []
        for nodes in FIXED:
            line = Line(machine, source, count, nodes, rate, pool.latency_s)
            speeds.append((plain_s / sum(line.time_s(text) for text in texts), nodes))
        found[count] = max(speeds)
    # One verifier may also wait for its drafter, as it does in a line of one.
    one = max([*ones, *(found.pop(count) for count in (1,) if count in found)])
    return Outcome(one, found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.replay.dsi", description=__doc__)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--machines", default="gpu", help="separated by commas")
    parser.add_argument("--places", default="own-0.5,own-2,own-8", help="of drafters, likewise")
    options = parser.parse_args(arguments)
    texts = load(options.texts)
    several = [count for count in NUM_VERIFIERS if count > 1]
    print(f"| machine | nodes/s | law | 1 | {' | '.join(map(str, several))} | gain |")
    print("|" + "---|" * (5 + len(several)))
    best = 0.0
    cells = [
        (machine, place, law)
        for machine in options.machines.split(",")
        for place in options.places.split(",")
        for law in LAWS
    ]
    for machine, place, law in tqdm(cells, file=sys.stderr):
        chosen = [each for each in texts if each.is_sampled is LAWS[law]]
        found = judge(chosen, MACHINES[machine], PLACES[place] or 0.0)
        told = [f"{speed:.2f} ({nodes or 'own'})" for speed, nodes in
                (found.one, *(found.several[count] for count in several))]  # fmt: skip
        best = max(best, found.gain)
        print(
            f"| {machine} | {PLACES[place]:,.0f} | {law} | {' | '.join(told)} | {found.gain:.2f} |"
        )
    print(f"\nBest gain: {best:.2f}; bar: {BAR}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
