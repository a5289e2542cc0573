"""The cells of the replay, and what is found in each: plain, the best fixed budget, adaptive."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from benchmarks.replay.simulate import Adaptive, Fixed, Simulation
from benchmarks.replay.texts import RecordedText
from benchmarks.replay.world import (
    CPU,
    GPU,
    Machine,
    Pool,
    Source,
    merged,
    random_source,
    recorded,
    silent_source,
)
from cluster.config.schema import CoordinatorConfig

MACHINES = {machine.name: machine for machine in (CPU, GPU)}
SIZES = (1, 4, 16, 32, 64)
LAWS = {"greedy": False, "sampled": True}
BEHAVIOURS = ("good", "mixed", "random", "sleeping")
# Nodes per second and text of drafters on devices of their own; None = residents.
PLACES: dict[str, float | None] = {
    "resident": None, "own-0.5": 500.0, "own-2": 2000.0, "own-8": 8000.0,
}  # fmt: skip
# Numbers of nodes per text that a fixed budget is tried with.
FIXED = (1, 2, 3, 4, 6, 8, 12, 16)
# Tokens per cell: a request's first minutes, and of a crowd as much as shows its rates.
_TOKENS = {1: 4000, 4: 8000, 16: 16000, 32: 24000, 64: 32000}


@dataclass(frozen=True, slots=True)
class Cell:
    machine: str
    place: str
    behaviour: str
    law: str
    num_sequences: int


@dataclass(frozen=True, slots=True)
class Found:
    """Tokens per second of virtual time.  best_nodes: of the best fixed budget, 0 = plain.

    whys: rounds by why they verified nothing.
    """

    cell: Cell
    plain: float
    best: float
    best_nodes: int
    adaptive: float
    whys: dict[str, int]

    @property
    def of_plain(self) -> float:
        return self.adaptive / self.plain

    @property
    def of_best(self) -> float:
        return self.adaptive / self.best

    def record(self) -> dict[str, object]:
        return {
            **asdict(self.cell), "plain": self.plain, "best_fixed": self.best,
            "best_nodes": self.best_nodes, "adaptive": self.adaptive,
            "of_plain": self.of_plain, "of_best_fixed": self.of_best,
            "whys": self.whys,
        }  # fmt: skip


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
    """The drafters of a cell.  drafters: the recorded ones; models: those that are no look-ups."""
    good: dict[str, Source] = {name: recorded(name) for name in drafters}
    sources = {
        "good": good,
        "mixed": {**good, "random": random_source()},
        "random": {"random": random_source()},
        "sleeping": {"sleeping": silent_source()},
    }[cell.behaviour]
    own = frozenset(sources) & (models | {"random"})
    return Pool(cell.place, sources, own, PLACES[cell.place])


class Bench:
    """Runs cells over one set of recorded texts; what cells share is computed once."""

    def __init__(
        self,
        texts: Sequence[RecordedText],
        tokens: dict[int, int] | None = None,
        models: frozenset[str] = frozenset(),
    ) -> None:
        """tokens: of a cell, by its requests.  models: recorded drafters that are no look-ups."""
        self._texts = {
            law: [text for text in texts if text.is_sampled is sampled and len(text.token_ids) > 1]
            for law, sampled in LAWS.items()
        }
        self._drafters = tuple(texts[0].trees)
        self._models = models & set(self._drafters)
        look_ups = tuple(name for name in self._drafters if name not in models)
        # What a fixed budget may ask: all of them, or look-ups alone.
        self._merged = {len(names): merged(names) for names in (self._drafters, look_ups) if names}
        self._tokens = tokens or _TOKENS
        self._fixed: dict[tuple[str, str, str, int], tuple[float, float, int]] = {}

    def run(self, cell: Cell, config: CoordinatorConfig | None = None) -> Found:
        machine = MACHINES[cell.machine]
        plain, best, best_nodes = self._fixed_of(cell, machine)
        pool = pool_of(cell, self._drafters, self._models)
        policy = Adaptive(machine, pool, config)
        outcome = self._simulation(cell, machine, pool).run(policy, self._num_tokens(cell))
        return Found(cell, plain, best, best_nodes, outcome.rate, policy.whys)

    def _fixed_of(self, cell: Cell, machine: Machine) -> tuple[float, float, int]:
        """(plain, the best fixed budget's rate, its nodes), for good drafters; else plain."""
        key = (cell.machine, cell.place, cell.law, cell.num_sequences)
        if key not in self._fixed:
            rates: dict[tuple[int, int], float] = {}
            for num_drafters, source in self._merged.items():
                own = self._models if num_drafters == len(self._drafters) else frozenset()
                pool = Pool(cell.place, {"merged": source}, own, PLACES[cell.place])
                for count in (0, *FIXED):
                    outcome = self._simulation(cell, machine, pool).run(
                        Fixed(count), self._num_tokens(cell)
                    )
                    rates[count, num_drafters] = outcome.rate
            best = max(rates, key=lambda each: rates[each])
            self._fixed[key] = rates[0, len(self._drafters)], rates[best], best[0]
        plain, best_rate, best_nodes = self._fixed[key]
        if cell.behaviour in ("random", "sleeping"):
            return plain, plain, 0
        return plain, best_rate, best_nodes

    def _simulation(self, cell: Cell, machine: Machine, pool: Pool) -> Simulation:
        return Simulation(self._texts[cell.law], machine, pool, cell.num_sequences)

    def _num_tokens(self, cell: Cell) -> int:
        return self._tokens[cell.num_sequences]
