"""Judges which of several models the control loop asks, without a clock.

    python -m benchmarks.replay.ensembles --out docs/benchmarks/replay/ensembles.json

Texts and drafters are artificial (`benchmarks.replay.synthetic`), so nothing here says what a
trained drafter brings.  Three specialists are each right more often in texts of one kind.  The loop
is told no kind.  It is compared with one that may ask each text's own specialist alone, and what a
drafter costs that is never right is measured.

    python -m benchmarks.replay.ensembles --texts TEXTS --out docs/benchmarks/replay/real.jsonl

TEXTS: recorded by `benchmarks.replay.record` with real specialists, each under the name of its
task.  The loop is compared with the same oracle, and with itself where it has one drafter alone.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from benchmarks.replay.machines import MACHINES
from benchmarks.replay.synthetic import KINDS, USELESS, Leads, kind_at, specialists
from benchmarks.support.options import add_options, parser_of
from cluster.core import TokenTree
from cluster.plan.in_flight import Round
from cluster.plan.resident import EVERYONE
from cluster.records import frozen
from cluster.simulate.replay import Adaptive, Playing, Simulation
from cluster.simulate.texts import RecordedText, load
from cluster.simulate.world import Pool, recorded

# Tokens of a text after which the loop is to know it.
KNOWN_AFTER = 200
SIZES = (1, 4)
LEADS = (Leads(0.8, 0.5), Leads(0.8, 0.5, shares=False), Leads(0.8, 0.5, changes=True))
_SECONDS = 20.0
_SEEDS = range(2)
# The time in which a model reads a token.
_READ_S = 0.00003


class Watched(Adaptive):
    """The target's own controller; the kinds of the texts are hidden from it.

    tokens, time_s: of all texts; known_tokens, known_s: behind KNOWN_AFTER tokens.
    """

    tokens, time_s, known_tokens, known_s = 0, 0.0, 0, 0.0

    def plan(self, batch: Sequence[Playing], now: float, prompt_rows: int) -> Sequence[TokenTree]:
        for own in batch:
            own.text.group = "default", own.recorded.is_sampled
        return super().plan(batch, now, prompt_rows)

    def learn(self, batch: Sequence[Playing], done: Round) -> None:
        super().learn(batch, done)
        share_s = ((done.step_time_s or 0.0) + done.draft_time_s) / max(len(batch), 1)
        for own, count in zip(batch, done.num_tokens, strict=True):
            self.tokens, self.time_s = self.tokens + count, self.time_s + share_s
            if own.position - count >= KNOWN_AFTER:
                self.known_tokens, self.known_s = self.known_tokens + count, self.known_s + share_s


class Oracle(Watched):
    """The same; each text may ask the specialist alone whose kind it is of at present."""

    def plan(self, batch: Sequence[Playing], now: float, prompt_rows: int) -> Sequence[TokenTree]:
        for own in batch:
            own.text.names = (kind_at(own.recorded, own.position),)
        return super().plan(batch, now, prompt_rows)

    def first_ask(self, own: Playing, now: float) -> None:
        own.text.names = (kind_at(own.recorded, own.position),)
        super().first_ask(own, now)


class Told(Watched):
    """The same; it knows from each prompt what every model will bring, and all of them read it."""

    def first_ask(self, own: Playing, now: float) -> None:
        super().first_ask(own, now)
        for name in KINDS:
            is_own = name == kind_at(own.recorded, 0)
            for outcome in (2, 3, 2, 2) * 2 if is_own else (1,) * 8:
                own.text.standing.note(name, 0, outcome)
        if own.text.ask.num_nodes:
            own.text.take_ask(own.text.ask, EVERYONE, self._pool.residents)


@frozen
class Speeds:
    """Tokens per second of the machine: behind KNOWN_AFTER tokens of each text, and of all."""

    known: float
    whole: float


# A policy, and the names of the drafters that it may ask.
Arm = tuple[type[Watched], tuple[str, ...]]
# told: where prompts tell all.  with a useless one: with a drafter more that is never right.
MADE_UP: dict[str, Arm] = {
    "learned": (Watched, KINDS),
    "oracle": (Oracle, KINDS),
    "told": (Told, KINDS),
    "with a useless one": (Watched, (*KINDS, USELESS)),
}


@frozen
class Cell:
    """texts: what they are."""

    machine: str
    texts: str
    num_sequences: int


def arms_of(names: tuple[str, ...]) -> dict[str, Arm]:
    """Return the loop with all of these drafters and with each alone, and the oracle."""
    alone: dict[str, Arm] = {each: (Watched, (each,)) for each in names}
    return {"learned": (Watched, names), "oracle": (Oracle, names), **alone}


def judge(
    cell: Cell, texts: Sequence[RecordedText], arms: Mapping[str, Arm], seconds: float = _SECONDS
) -> dict[str, Speeds]:
    """Play one cell; returns the speeds by arm."""
    machine = replace(MACHINES[cell.machine], read_s=_READ_S)
    found = {}
    for arm, (policy, names) in arms.items():
        pool = Pool({each: recorded(each) for each in names}, frozenset(names))
        played = [policy(machine, pool) for _ in _SEEDS]
        for seed, own in zip(_SEEDS, played, strict=True):
            Simulation(texts, machine, pool, cell.num_sequences).run(own, seconds, seed)
        found[arm] = Speeds(
            sum(each.known_tokens for each in played) / sum(each.known_s for each in played),
            sum(each.tokens for each in played) / sum(each.time_s for each in played),
        )
    return found


def _kinds(
    path: Path | None,
) -> Iterator[tuple[str, Sequence[RecordedText], dict[str, Arm]]]:
    """Yield what texts there are, and their arms.  path: of recorded ones."""
    if path is None:
        for leads in LEADS:
            yield str(leads), specialists(24, leads), MADE_UP
        return
    # Those that have a specialist and are long enough.
    usable = [
        each for each in load(path) if each.task in each.trees and len(each.token_ids) > KNOWN_AFTER
    ]
    for law, is_sampled in (("greedy", False), ("sampled", True)):
        if texts := [each for each in usable if each.is_sampled is is_sampled]:
            yield law, texts, arms_of(tuple(texts[0].trees))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add_options(
        parser,
        out=(Path, "a file of one JSON object a line, to append to"),
        texts=(Path, "recorded ones, in place of artificial ones"),
        machines=("cpu,gpu", "separated by commas"),
        seconds=(_SECONDS, "virtual, of each cell"),
    )
    options = parser.parse_args(arguments)
    cells = itertools.product(options.machines.split(","), list(_kinds(options.texts)), SIZES)
    print("| machine | texts | at a time | speed to the oracle's ... |")
    for name, (kind, texts, arms), size in tqdm(list(cells), file=sys.stderr):
        cell = Cell(name, kind, size)
        found = judge(cell, texts, arms, options.seconds)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                speeds = {arm: asdict(each) for arm, each in found.items()}
                file.write(json.dumps({**asdict(cell), "speeds": speeds}) + "\n")
        oracle = found.pop("oracle")
        shares = [
            f"{arm} {own.known / oracle.known:.3f} ({own.whole / oracle.whole:.3f})"
            for arm, own in found.items()
        ]
        print(f"| {name} | {kind} | {size} | {' | '.join(shares)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
