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

import functools
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from benchmarks.replay.machines import MACHINES
from benchmarks.replay.synthetic import KINDS, USELESS, Leads, kind_at, specialists
from benchmarks.support.options import add_options, parser_of
from cluster.plan.resident import EVERYONE
from cluster.records import frozen
from cluster.simulate.replay import Adaptive, Playing, Simulation, Step, Times
from cluster.simulate.texts import RecordedText, load
from cluster.simulate.world import Machine, Pool, recorded
from cluster.spec.budget import Ask

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

    def plan(self, batch: Sequence[Playing], now: float, prompt_rows: int) -> Step:
        for own in batch:
            own.text.group = "default", own.recorded.is_sampled
        return super().plan(batch, now, prompt_rows)

    def learn(
        self, batch: Sequence[Playing], step: Step, num_tokens: Sequence[int], times: Times
    ) -> None:
        super().learn(batch, step, num_tokens, times)
        share_s = (times.step_s + times.draft_s) / max(len(batch), 1)
        for own, count in zip(batch, num_tokens, strict=True):
            self.tokens, self.time_s = self.tokens + count, self.time_s + share_s
            if own.position - count >= KNOWN_AFTER:
                self.known_tokens, self.known_s = self.known_tokens + count, self.known_s + share_s


class Oracle(Watched):
    """The same; each text may ask the specialist alone whose kind it is of at present."""

    def plan(self, batch: Sequence[Playing], now: float, prompt_rows: int) -> Step:
        for own in batch:
            own.text.names = (kind_at(own.recorded, own.position),)
        return super().plan(batch, now, prompt_rows)

    def first_ask(self, own: Playing, now: float) -> Ask:
        own.text.names = (kind_at(own.recorded, own.position),)
        return super().first_ask(own, now)


class Told(Watched):
    """The same; it knows from each prompt what every model will bring, and all of them read it."""

    def first_ask(self, own: Playing, now: float) -> Ask:
        ask = super().first_ask(own, now)
        for name in KINDS:
            is_own = name == kind_at(own.recorded, 0)
            for outcome in (2, 3, 2, 2) * 2 if is_own else (1,) * 8:
                own.text.standing.note(name, 0, outcome)
        if ask.num_nodes:
            own.text.take_ask(ask, EVERYONE, self._pool.residents)
        return ask


@frozen
class Speeds:
    """Tokens per second of the machine: behind KNOWN_AFTER tokens of each text, and of all."""

    known: float
    whole: float


@frozen
class Found:
    """The speeds of one cell.

    learned: of the loop; oracle: where each text asks its own specialist; told: where prompts tell
    all.  with_useless: of the loop, with a drafter more that is never right.
    """

    machine: str
    leads: Leads
    num_sequences: int
    learned: Speeds
    oracle: Speeds
    told: Speeds
    with_useless: Speeds


@frozen
class FoundRecorded:
    """The speeds of one cell along recorded texts.  alone: of the loop with one drafter."""

    machine: str
    law: str
    num_sequences: int
    num_texts: int
    learned: Speeds
    oracle: Speeds
    alone: dict[str, Speeds]


_texts = functools.cache(functools.partial(specialists, 24))


def judge(name: str, leads: Leads, num_sequences: int, seconds: float = _SECONDS) -> Found:
    """Play one cell."""
    machine = replace(MACHINES[name], read_s=_READ_S)
    texts = _texts(leads)
    return Found(
        name,
        leads,
        num_sequences,
        *(
            _played(policy, machine, texts, names, num_sequences, seconds)
            for policy, names in (
                (Watched, KINDS),
                (Oracle, KINDS),
                (Told, KINDS),
                (Watched, (*KINDS, USELESS)),
            )
        ),
    )


def judge_recorded(
    name: str, texts: Sequence[RecordedText], num_sequences: int, seconds: float
) -> FoundRecorded:
    """Play one cell.  texts: of one law."""
    machine, names = replace(MACHINES[name], read_s=_READ_S), tuple(texts[0].trees)

    def played(policy: type[Watched], names: Sequence[str]) -> Speeds:
        return _played(policy, machine, texts, names, num_sequences, seconds)

    law = "sampled" if texts[0].is_sampled else "greedy"
    return FoundRecorded(
        name,
        law,
        num_sequences,
        len(texts),
        played(Watched, names),
        played(Oracle, names),
        {each: played(Watched, (each,)) for each in names},
    )


def _played(
    policy: type[Watched],
    machine: Machine,
    texts: Sequence[RecordedText],
    names: Sequence[str],
    num_sequences: int,
    seconds: float,
) -> Speeds:
    pool = Pool({each: recorded(each) for each in names}, frozenset(names))
    played = []
    for seed in _SEEDS:
        own = policy(machine, pool)
        Simulation(texts, machine, pool, num_sequences).run(own, seconds, seed)
        played.append(own)
    return Speeds(
        sum(each.known_tokens for each in played) / sum(each.known_s for each in played),
        sum(each.tokens for each in played) / sum(each.time_s for each in played),
    )


def cells(machines: Sequence[str]) -> Iterator[tuple[str, Leads, int]]:
    """Yield the machine, the drafters and the number of texts of each cell."""
    for name in machines:
        for leads in LEADS:
            for num_sequences in SIZES:
                yield name, leads, num_sequences


def _append(out: Path | None, found: Found | FoundRecorded) -> None:
    if out:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(found)) + "\n")


def _shares(one: Speeds, other: Speeds) -> str:
    return f"{one.known / other.known:.3f} ({one.whole / other.whole:.3f})"


def _of_recorded(
    texts: Sequence[RecordedText], machines: Sequence[str], seconds: float
) -> Iterator[FoundRecorded]:
    """Play all cells of the texts that have a specialist and are long enough."""
    usable = [
        each for each in texts if each.task in each.trees and len(each.token_ids) > KNOWN_AFTER
    ]
    by_law = [[each for each in usable if each.is_sampled is law] for law in (False, True)]
    cells = list(itertools.product(machines, filter(None, by_law), SIZES))
    for name, law, num_sequences in tqdm(cells, file=sys.stderr):
        yield judge_recorded(name, law, num_sequences, seconds)


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
    machines = options.machines.split(",")
    if options.texts:
        print("| machine | law | texts | learned | one drafter alone ...")
        for real in _of_recorded(load(options.texts), machines, options.seconds):
            _append(options.out, real)
            shares = [_shares(real.learned, real.oracle)]
            shares += [f"{each} {_shares(own, real.oracle)}" for each, own in real.alone.items()]
            cell = f"{real.machine} | {real.law} | {real.num_sequences}"
            print(f"| {cell} | {' | '.join(shares)} |", flush=True)
        return 0
    print("| machine | drafters | texts | learned | told | with a useless one |")
    print("|" + "---|" * 6)
    for name, leads, count in tqdm(list(cells(machines)), file=sys.stderr):
        found = judge(name, leads, count, options.seconds)
        _append(options.out, found)
        shares = (
            _shares(found.learned, found.oracle),
            _shares(found.told, found.oracle),
            _shares(found.with_useless, found.learned),
        )
        print(f"| {name} | {leads} | {count} | {' | '.join(shares)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
