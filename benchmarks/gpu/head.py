"""An EAGLE-3-shaped head of random weights in the target; acceptance is synthetic."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu.part import Measurements, Row, Setting
from benchmarks.gpu.plain import decoded
from benchmarks.gpu.target import Target

# A level of a tree is accepted so often: tokens a round are then what trained heads bring (the
# EAGLE-3 paper's 8B at temperature 0 has acceptance rates of 0.7 to 0.8 by position).
_AGREEMENT = 0.75
_BATCHES, _TINY_BATCHES = (1, 8, 32), (1, 2)
_NODES, _TINY_NODES = (8, 16, 60), (4,)


def rows(setting: Setting) -> Measurements:
    tiny = setting.tiny
    batches = _TINY_BATCHES if tiny else _BATCHES
    target = Target(setting, head=True, agreement=_AGREEMENT, max_running_sequences=32)
    yield {"acceptance": f"synthetic, {_AGREEMENT} a level"}, target.fallbacks
    for batch in batches:
        for nodes in (0, *(_TINY_NODES if tiny else _NODES)):
            yield {"batch": batch, "nodes": nodes}, partial(_row, target, setting, batch, nodes)


def _row(target: Target, setting: Setting, batch: int, nodes: int) -> Row:
    return decoded(target, setting, batch, nodes=nodes)[0]
