"""How far the engine's check at load finds tree attention from the model's own, by random weights,
and how much it would allow."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu.model import fill
from benchmarks.gpu.part import Measurements, Row, Setting
from benchmarks.gpu.target import Target
from cluster.engine.loading import self_check

_SEEDS, _TINY_SEEDS = 20, 2


def rows(setting: Setting) -> Measurements:
    target = Target(setting, max_running_sequences=8)
    yield {}, target.fallbacks
    for seed in range(_TINY_SEEDS if setting.tiny else _SEEDS):
        yield {"seed": seed}, partial(_row, target, seed)


def _row(target: Target, seed: int) -> Row:
    fill(target.model.module, seed)
    row: Row = {}
    for name, found in self_check.distances(target.engine, target.model, is_long=True).items():
        row |= {f"{name} distance": found.deviation, f"{name} bound": found.bound}
        row[f"{name} of bound"] = found.deviation / found.bound
        if not found.deviation <= found.bound:
            row["failed"] = f"{name}: the engine would refuse this model"
    return row
