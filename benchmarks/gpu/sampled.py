"""Draws at Llama's own settings (temperature 0.6, top_p 0.9), beside those of no truncation."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu.part import Measurements, Row, Setting
from benchmarks.gpu.plain import decoded
from benchmarks.gpu.target import Target
from cluster.core import SamplingParams

_BATCHES, _TINY_BATCHES = (1, 8, 64), (1, 2)
_TOP_P = (0.9, 1.0)


def rows(setting: Setting) -> Measurements:
    target = Target(setting, max_running_sequences=64)
    yield {}, target.fallbacks
    for batch in _TINY_BATCHES if setting.tiny else _BATCHES:
        for top_p in _TOP_P:
            labels = {"batch": batch, "temperature": 0.6, "top_p": top_p}
            yield labels, partial(_row, target, setting, batch, top_p)


def _row(target: Target, setting: Setting, batch: int, top_p: float) -> Row:
    params = SamplingParams(0.6, top_p=top_p, seed=1, max_tokens=4096)
    return decoded(target, setting, batch, params=params)[0]
