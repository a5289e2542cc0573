"""Plays rollouts of drafters in virtual time: who is promoted, when, and what a poisoned one costs.

    python -m benchmarks.replay.rollout TEXTS [--json OUT]

TEXTS: recorded by `benchmarks.replay.record`, with drafters `lm` and `suffix`.  Four streams are
answered for ten minutes of virtual time, with the target's own controller and the usual share of
requests in which both draft; the steps cost what a GPU's would.  In the first two scenes the
drafters are the recorded ones, of which neither is much better; in all others they are made from
`lm` by hand, and say nothing about any drafter.

Exit status 1 if a good drafter does not serve within the ten minutes, any other one does, or one
that turns bad while it is a canary or serves is not out within 300 places.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.replay.machines import MACHINES
from benchmarks.support.options import add_options, parser_of
from benchmarks.support.record import rows
from cluster.config.rollout import RolloutConfig
from cluster.core import TokenTree
from cluster.plan.candidate import Phase
from cluster.plan.in_flight import Round
from cluster.plan.roster import Roster
from cluster.plan.scores import DraftScores
from cluster.records import frozen
from cluster.simulate.replay import Adaptive, Playing, Simulation
from cluster.simulate.texts import RecordedText, load
from cluster.simulate.world import Machine, Offer, Pool, Source, recorded

SECONDS = 600.0
STREAMS = 4
MAX_PLACES_OF_POISON = 300
# A token that no text has.
_WRONG = 2**30
NEW, OLD = "new", "old"


@frozen
class Scene:
    """A candidate `new` and the former `old`.

    ends_in: the phase in which it ends; None = any but that of serving.  poisoned_in: the phase
    from whose beginning on every draft of the candidate is wrong, None = never.
    """

    name: str
    new: Source
    old: Source
    ends_in: Phase | None = None
    is_artificial: bool = True
    poisoned_in: Phase | None = None


def spoiled(source: Source, share: float, seed: int) -> Source:
    """A drafter whose trees are wrong at this share of places, from the root on."""

    def tree_at(text: RecordedText, position: int) -> Offer:
        tree, claimed = source.tree_at(text, position)
        key = (seed, position, *text.token_ids[:4].tolist())
        if np.random.default_rng(key).random() < share:
            return TokenTree(tree.token_ids + _WRONG, tree.parents), claimed
        return tree, claimed

    return Source(tree_at)


def scenes() -> list[Scene]:
    lm, suffix = recorded("lm"), recorded("suffix")
    half = spoiled(lm, 0.3, 1)
    return [
        Scene("lm for suffix", lm, suffix, is_artificial=False),
        Scene("suffix for lm", suffix, lm, is_artificial=False),
        Scene("better by a third", lm, half, Phase.ACTIVE),
        Scene("better by a tenth", lm, spoiled(lm, 0.1, 1), Phase.ACTIVE),
        Scene("the same", lm, lm),
        Scene("as good, at other places", half, spoiled(lm, 0.3, 2)),
        Scene("worse by a tenth", spoiled(lm, 0.1, 1), lm),
        Scene("worse by a third", half, lm),
        Scene("useless", spoiled(lm, 1.0, 1), lm),
        Scene("poisoned canary", lm, half, Phase.RETIRED, poisoned_in=Phase.CANARY),
        Scene("poisoned when it serves", lm, half, Phase.RETIRED, poisoned_in=Phase.ACTIVE),
    ]


@dataclass(slots=True)
class Played:
    """What has become of a scene.

    reached_s: the virtual time at which each phase began.  places_of_poison: compared since the
    candidate was poisoned until it was out.
    """

    scene: Scene
    seed: int
    reached_s: dict[Phase, float] = field(default_factory=dict)
    phase: Phase = Phase.SHADOW
    places_of_poison: int = 0

    @property
    def is_right(self) -> bool:
        wanted = self.scene.ends_in
        is_there = self.phase is wanted if wanted else Phase.ACTIVE not in self.reached_s
        return is_there and self.places_of_poison <= MAX_PLACES_OF_POISON

    def record(self) -> dict[str, Any]:
        return {
            "scene": self.scene.name,
            "is_artificial": self.scene.is_artificial,
            "seed": self.seed,
            "reached_s": {phase.value: round(at, 1) for phase, at in self.reached_s.items()},
            "phase": self.phase.value,
            "places_of_poison": self.places_of_poison,
            "is_right": self.is_right,
        }


class _OverError(Exception):
    """The candidate has come to where it ends."""


class Watched(Adaptive):
    """The controller, and a note of every change of phase."""

    def __init__(self, machine: Machine, pool: Pool, played: Played, roster: Roster) -> None:
        super().__init__(machine, pool, scores=DraftScores(roster))
        self._played, self._roster = played, roster
        self._now = 0.0
        self.is_poisoned = False

    def plan(self, batch: Sequence[Playing], now: float, prompt_rows: int) -> Sequence[TokenTree]:
        self._now = now
        return super().plan(batch, now, prompt_rows)

    def learn(self, batch: Sequence[Playing], done: Round) -> None:
        (former,) = self._roster.table()
        super().learn(batch, done)
        (now,) = self._roster.table()
        played, phase = self._played, Phase(str(now["phase"]))
        if self.is_poisoned and played.phase is not Phase.RETIRED:
            played.places_of_poison += max(int(str(now["places"])) - int(str(former["places"])), 0)
        if phase is not played.phase:
            for own in batch:
                self._roster.drop_trees(own.text)
            played.phase = phase
            played.reached_s.setdefault(phase, self._now)
        if phase is played.scene.poisoned_in:
            self.is_poisoned = True
        if phase is played.scene.ends_in:
            raise _OverError


def play(
    scene: Scene,
    texts: Sequence[RecordedText],
    seed: int,
    seconds: float = SECONDS,
    share: float = RolloutConfig().canary_share,
) -> Played:
    """Play one scene.  share: of the requests in which both draft."""
    played = Played(scene, seed)
    roster = Roster({NEW: RolloutConfig(OLD, share)})
    for name in (NEW, OLD):
        roster.met(name, "")
    policies: list[Watched] = []

    def tree_at(text: RecordedText, position: int) -> Offer:
        tree, claimed = scene.new.tree_at(text, position)
        if policies and policies[0].is_poisoned:
            return TokenTree(tree.token_ids + _WRONG, tree.parents), claimed
        return tree, claimed

    sources = {NEW: Source(tree_at), OLD: scene.old}
    pool = Pool(sources, models=frozenset(sources))
    policies.append(Watched(MACHINES["gpu"], pool, played, roster))
    simulation = Simulation(texts, MACHINES["gpu"], pool, STREAMS)
    with contextlib.suppress(_OverError):
        simulation.run(policies[0], seconds, seed)
    return played


def row(found: Sequence[Played]) -> str:
    """A line of the table: one scene with all seeds."""
    scene = found[0].scene

    def told(value: Callable[[Played], float | None]) -> str:
        values = [each for each in map(value, found) if each is not None]
        return f"{min(values):.0f} to {max(values):.0f}" if values else "never"

    poison = told(lambda each: each.places_of_poison) if scene.poisoned_in else ""
    return (
        f"| {scene.name}{' (artificial)' if scene.is_artificial else ''} "
        f"| {told(lambda each: each.reached_s.get(Phase.CANARY))} "
        f"| {told(lambda each: each.reached_s.get(Phase.ACTIVE))} "
        f"| {told(lambda each: each.reached_s.get(Phase.RETIRED))} | {poison} "
        f"| {sum(each.is_right for each in found)} of {len(found)} |"
    )


HEADER = (
    "| candidate | canary after, s | serves after, s | retired after, s | places of poison "
    "| as expected |\n|" + "---|" * 6
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("texts", type=Path)
    add_options(
        parser,
        json=(Path, "write all that was found there"),
        seeds=3,
        seconds=(SECONDS, "of virtual time"),
        share=(RolloutConfig().canary_share, "sample"),
        only=("", "scenes whose names contain this"),
    )
    options = parser.parse_args(arguments)
    texts = load(options.texts)
    chosen = [scene for scene in scenes() if options.only in scene.name]
    found: list[Played] = []
    print(HEADER)
    for scene in tqdm(chosen, file=sys.stderr):
        seeds = range(options.seeds)
        own = [play(scene, texts, seed, options.seconds, options.share) for seed in seeds]
        found += own
        print(row(own), flush=True)
    if options.json:
        options.json.write_text(rows([each.record() for each in found]) + "\n")
    return int(not all(each.is_right for each in found))


if __name__ == "__main__":
    raise SystemExit(main())
