"""Takes one mechanism of the control loop away at a time, and plays the replay's cells without it.

    python -m benchmarks.replay.ablation TEXTS --out docs/benchmarks/replay/ablation.json

TEXTS: recorded by `benchmarks.replay.record`.  A figure is the speed without a mechanism in that
with all of them, over the same seeds, with its interval: below 1, the mechanism brings something.
`all`: without any of them.  Cells whose name begins with `made-up` have artificial texts and models
(`benchmarks.replay.synthetic`), and say nothing of trained ones.  Their texts name no kind as their
task, or the scores by task would tell which model leads in which text.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from tqdm import tqdm

from benchmarks.replay.grid import Cell, pool_of
from benchmarks.replay.machines import MACHINES
from benchmarks.replay.synthetic import KINDS, Leads, specialists
from benchmarks.support.options import add_options, parser_of
from benchmarks.support.record import Record
from cluster.plan import arms, ensemble, load
from cluster.plan.arms import Arm, Exploration, Standing
from cluster.records import frozen
from cluster.simulate.replay import Adaptive, Simulation
from cluster.simulate.world import Machine, Pool, RecordedText, recorded
from cluster.simulate.world import load as load_texts
from cluster.spec.acceptance import Score
from cluster.spec.interval import Interval
from cluster.spec.step_profile import NODE_EDGES
from cluster.spec.survival import Calibrator

# The time in which a model reads a token of a prompt.
_READ_S = 0.00003
_SECONDS, _SECONDS_OF_MANY = 5.0, 10.0
_LEADS = (Leads(0.8, 0.5), Leads(0.8, 0.5, shares=False), Leads(0.8, 0.5, changes=True))


class _Never(Exploration):
    def is_due(self, now: float, cost_s: float) -> bool:
        return False


def _without(change: Callable[[load.TargetModel], None]) -> Any:
    """Return a patch by which each new target is changed."""
    begin = load.TargetModel.__init__

    def changed(self: load.TargetModel, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        change(self)

    return patch.object(load.TargetModel, "__init__", changed)


def _never_tries(target: load.TargetModel) -> None:
    for law in target.laws:
        for arm in law.arms:
            arm.tried = _Never()


def _whole_turns(self: Arm, weights: Any, prices: Any) -> Any:
    """Return what each size brings if all its nodes are verified."""
    nodes = len(weights) * self._nodes.sum(axis=1).cumsum()
    tokens = self.trust * float(weights.sum()) * self._tokens.sum(axis=1).cumsum()
    extra_s = np.interp(nodes, NODE_EDGES, prices.extra_s)
    return np.where(self._turns > 0, np.maximum(tokens - prices.rate * extra_s, 0.0), 0.0)


Patch = Callable[[], Any]
# Corrections of a probability, then explorers.
MECHANISMS: dict[str, Patch] = {
    "calibration": lambda: patch.object(Calibrator, "_fit", lambda self: self.sums[-1:].fill(0)),
    "trust": lambda: patch.object(Arm, "trust", 1.0),
    "outcomes in a text": lambda: patch.object(
        Standing, "expected", lambda self, drafter, place, prior: prior
    ),
    "change within a text": lambda: patch.object(arms, "_CHANGED_SHARE", 0.0),
    "weights of a merge": lambda: patch.object(Score, "weight", lambda self: 1.0),
    "histogram of worth": lambda: patch.object(Arm, "values", _whole_turns),
    "tries of arms": lambda: _without(_never_tries),
    "tries of models": lambda: patch.object(ensemble.Ensemble, "add_tries", lambda *_: 0.0),
    "more of first tries": lambda: patch.object(arms, "_FIRST_SHARE", 0.003),
}
# What one drafter does not need.
_OF_MANY = (
    "trust",
    "outcomes in a text",
    "change within a text",
    "weights of a merge",
    "tries of models",
    "more of first tries",
)


@frozen
class _Stage:
    """A cell with all that it takes to play it."""

    texts: Sequence[RecordedText]
    machine: Machine
    pool: Pool
    num_sequences: int
    seconds: float
    mechanisms: Sequence[str]

    def speed(self, seed: int) -> float:
        policy = Adaptive(self.machine, self.pool)
        played = Simulation(self.texts, self.machine, self.pool, self.num_sequences)
        return played.run(policy, self.seconds, seed).speed


def stages(texts: Sequence[RecordedText], models: frozenset[str]) -> Iterator[tuple[str, _Stage]]:
    names = tuple(texts[0].trees)
    for machine in ("cpu", "cpu-half", "gpu"):
        for law, is_sampled in (("greedy", False), ("sampled", True)):
            own = [each for each in texts if each.is_sampled is is_sampled]
            for size in (1, 4, 16):
                for behaviour in ("good", "mixed") if size < 16 and not is_sampled else ("good",):
                    cell = Cell(machine, "resident", behaviour, law, size)
                    pool = pool_of(cell, names, models)
                    yield (
                        f"{machine}, {law}, {behaviour}, {size}",
                        _Stage(own, MACHINES[machine], pool, size, _SECONDS, tuple(MECHANISMS)),
                    )
    for machine in ("cpu", "gpu"):
        for leads in _LEADS:
            made = [replace(each, task="default") for each in specialists(24, leads)]
            of = replace(MACHINES[machine], read_s=_READ_S)
            pool = Pool({each: recorded(each) for each in KINDS}, frozenset(KINDS))
            kind = "changes" if leads.changes else "shared" if leads.shares else "own places"
            for size in (1, 4):
                yield (
                    f"made-up, {machine}, {kind}, {size}",
                    _Stage(made, of, pool, size, _SECONDS_OF_MANY, _OF_MANY),
                )


def shares(stage: _Stage, seeds: int) -> dict[str, list[float | None]]:
    """Return the speed without each mechanism in that with all: mean, and the ends of its interval,
    which one seed alone does not have."""
    with_all = [stage.speed(seed) for seed in range(seeds)]
    found = {}
    for name in (*stage.mechanisms, "all"):
        with contextlib.ExitStack() as patches:
            for each in stage.mechanisms if name == "all" else (name,):
                patches.enter_context(MECHANISMS[each]())
            speeds = [stage.speed(seed) for seed in range(seeds)]
        interval = Interval.of([own / whole for own, whole in zip(speeds, with_all, strict=True)])
        found[name] = [None if each is None else round(each, 4) for each in astuple(interval)[:3]]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("texts", type=Path)
    add_options(
        parser,
        models=("lm", "recorded ones that are no look-ups"),
        seeds=20,
        cells=("", "those whose name begins so"),
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    settings = {"texts": options.texts.name, "models": options.models, "seeds": options.seeds}
    record = Record(options.out, settings)
    texts = load_texts(options.texts)
    chosen = dict(stages(texts, frozenset(options.models.split(","))))
    for name, stage in tqdm(chosen.items(), file=sys.stderr):
        if name.startswith(options.cells) and name not in record.results:
            record.add(name, shares(stage, options.seeds))
            record.publish(record.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
