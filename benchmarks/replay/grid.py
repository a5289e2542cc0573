"""The cells of the replay, and the speeds in each: the best fixed budget and the adaptive one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from benchmarks.replay.machines import MACHINES
from benchmarks.replay.rivals import Fixed, merged, random_source, silent_source
from cluster.config.schema import CoordinatorConfig
from cluster.records import frozen
from cluster.simulate.replay import Adaptive, Outcome, Policy, Simulation
from cluster.simulate.world import DraftSource, Machine, Pool, RecordedText, recorded

SIZES = (1, 4, 16, 32, 64)
LAWS = {"greedy": False, "sampled": True}
BEHAVIOURS = ("good", "mixed", "random", "sleeping")
# Nodes per second and text of drafters on devices of their own; None = residents.
PLACES: dict[str, float | None] = {
    "resident": None,
    "own-0.5": 500.0,
    "own-2": 2000.0,
    "own-8": 8000.0,
}
# Numbers of nodes per text that a fixed budget is tried with.
FIXED = (1, 2, 3, 4, 6, 8, 12, 16)
# Virtual seconds of a cell, from a cold start.
SECONDS = 5.0


@frozen
class Cell:
    machine: str
    place: str
    behaviour: str
    law: str
    num_sequences: int


@frozen
class Found:
    """Speeds relative to plain decoding.

    best: of the fixed budgets, with its number of nodes, 0 = plain.  whys: number of rounds by the
    reason why they verified nothing.
    """

    cell: Cell
    best: float
    best_nodes: int
    adaptive: float
    whys: dict[str, int]

    @property
    def of_best(self) -> float:
        return self.adaptive / self.best

    def record(self) -> dict[str, object]:
        return {
            **asdict(self.cell),
            "best_fixed": self.best,
            "best_nodes": self.best_nodes,
            "adaptive": self.adaptive,
            "of_best_fixed": self.of_best,
            "whys": self.whys,
        }


def cells(
    machines: Sequence[str] = tuple(MACHINES),
    places: Sequence[str] = tuple(PLACES),
    behaviours: Sequence[str] = BEHAVIOURS,
    laws: Sequence[str] = tuple(LAWS),
    sizes: Sequence[int] = SIZES,
) -> Iterator[Cell]:
    for values in itertools.product(machines, places, behaviours, laws, sizes):
        yield Cell(*values)


def pool_of(cell: Cell, drafters: Sequence[str], models: frozenset[str]) -> Pool:
    """Return a cell's drafters.  drafters: recorded ones; models: those that are no look-ups."""
    good: dict[str, DraftSource] = {name: recorded(name) for name in drafters}
    sources = {
        "good": good,
        "mixed": {**good, "random": random_source()},
        "random": {"random": random_source()},
        "sleeping": {"sleeping": silent_source()},
    }[cell.behaviour]
    own = frozenset(sources) & (models | {"random"})
    return _placed(cell, sources, own)


def _placed(cell: Cell, sources: Mapping[str, DraftSource], models: frozenset[str]) -> Pool:
    nodes_per_s = PLACES[cell.place]
    remote = frozenset() if nodes_per_s is None else frozenset(sources)
    return Pool(sources, models, remote, nodes_per_s or 0.0)


class Bench:
    """Runs cells over one set of recorded texts; what cells share is computed once."""

    def __init__(
        self,
        texts: Sequence[RecordedText],
        seconds: float = SECONDS,
        models: frozenset[str] = frozenset(),
        config: CoordinatorConfig | None = None,
    ) -> None:
        """seconds: of virtual time in each cell.  models: recorded ones that are no look-ups.
        config: the controller's."""
        self._config = config
        self._texts = {
            law: [text for text in texts if text.is_sampled is sampled and len(text.token_ids) > 1]
            for law, sampled in LAWS.items()
        }
        self._drafters = tuple(texts[0].trees)
        self._models = models & set(self._drafters)
        look_ups = tuple(name for name in self._drafters if name not in models)
        # The drafters that a fixed budget may ask: all of them, or look-ups alone.
        self._merged = {len(names): merged(names) for names in (self._drafters, look_ups) if names}
        self._seconds = seconds
        self._fixed: dict[tuple[str, str, str, int], tuple[float, int]] = {}

    def run(self, cell: Cell) -> Found:
        best, best_nodes = self._fixed_of(cell, MACHINES[cell.machine])
        policy = self._adaptive(cell, self._config)
        speed = self.play(cell, policy, self._seconds).speed
        return Found(cell, best, best_nodes, speed, policy.whys)

    def speed(self, cell: Cell, config: CoordinatorConfig) -> float:
        """Return the speed of the controller with any settings, in plain decoding's."""
        return self.play(cell, self._adaptive(cell, config), self._seconds).speed

    def _adaptive(self, cell: Cell, config: CoordinatorConfig | None) -> Adaptive:
        return Adaptive(MACHINES[cell.machine], self.pool_of(cell), config)

    def pool_of(self, cell: Cell) -> Pool:
        """Return a cell's drafters."""
        return pool_of(cell, self._drafters, self._models)

    def play(self, cell: Cell, policy: Policy, seconds: float = SECONDS) -> Outcome:
        """Play a cell by any policy."""
        machine = MACHINES[cell.machine]
        return self._simulation(cell, machine, self.pool_of(cell)).run(policy, seconds)

    def _fixed_of(self, cell: Cell, machine: Machine) -> tuple[float, int]:
        """Return (the best fixed budget's speed, its nodes); for bad drafters those of plain."""
        if cell.behaviour in ("random", "sleeping"):
            return 1.0, 0
        key = (cell.machine, cell.place, cell.law, cell.num_sequences)
        if key not in self._fixed:
            speeds = {0: 1.0}
            for num_drafters, source in self._merged.items():
                # Of both kinds' trees in one, the models' price is to be paid.
                asks_models = self._models and num_drafters == len(self._drafters)
                own = frozenset({"merged"}) if asks_models else frozenset()
                pool = _placed(cell, {"merged": source}, own)
                for count in FIXED:
                    outcome = self._simulation(cell, machine, pool).run(Fixed(count), self._seconds)
                    speeds[count] = max(outcome.speed, speeds.get(count, 0.0))
            best = max(speeds, key=lambda each: speeds[each])
            self._fixed[key] = speeds[best], best
        return self._fixed[key]

    def _simulation(self, cell: Cell, machine: Machine, pool: Pool) -> Simulation:
        return Simulation(self._texts[cell.law], machine, pool, cell.num_sequences)
