"""The kernels of a plain step and of a drafted round, by name, and the gaps between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.part import Measurements, Row, Setting
from benchmarks.gpu.plain import PROMPT_LEN, TINY_PROMPT_LEN
from benchmarks.gpu.target import Target

_STEPS = (("plain", 0, "graphs"), ("plain, eager", 0, "eager"), ("8 nodes", 8, "graphs"))
_ROUNDS = 3
_MOST_NAMES, _TINY_NAMES = 40, 4
# Of the same name but for its template's arguments.
_NAME_LEN = 90


def rows(setting: Setting) -> Measurements:
    """Of each step one row for the whole, and one for each name."""
    target = Target(setting, head=True, agreement=0.75, max_running_sequences=8)
    for step, nodes, mode in _STEPS:
        events: list[Any] = []
        yield {"step": step}, partial(_whole, target, setting, nodes, mode, events)
        for name, own in _by_name(events)[: _TINY_NAMES if setting.tiny else _MOST_NAMES]:
            yield {"step": step}, partial(_of_name, name, own)


def _whole(target: Target, setting: Setting, nodes: int, mode: str, events: list[Any]) -> Row:
    """Prompt and warm-up are in the trace too; the last rounds alone are told."""
    prompt_len = TINY_PROMPT_LEN if setting.tiny else PROMPT_LEN
    on_gpu = setting.device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    times = target.run(1, prompt_len, _ROUNDS, nodes=nodes, mode=mode)
    with profile(activities=activities) as profiler:
        traced = target.run(1, prompt_len, _ROUNDS, nodes=nodes, mode=mode)
    events += _of_device(profiler.events(), setting, 1e6 * _length_s(traced))
    gaps = [
        max(later.time_range.start - sooner.time_range.end, 0.0)
        for sooner, later in pairwise(events)
    ]
    busy = sum(each.time_range.elapsed_us() for each in events)
    return {
        "kernels a round": len(events) / _ROUNDS,
        "us a round": busy / _ROUNDS,
        "gaps us a round": sum(gaps) / _ROUNDS,
        "largest gap us": max(gaps, default=0.0),
        "round_ms untraced": times.row()["round_ms"],
    }


def _length_s(times: Any) -> float:
    return float(sum(times.draft_s) + sum(times.step_s))


def _of_device(found: Any, setting: Setting, length_us: float) -> list[Any]:
    """What the device did in the last `length_us`, by its start."""
    kind = torch.autograd.DeviceType.CUDA if setting.device.type == "cuda" else None
    own = [each for each in found if kind is None or each.device_type == kind]
    own.sort(key=lambda each: each.time_range.start)
    end = max((each.time_range.end for each in own), default=0.0)
    return [each for each in own if each.time_range.start >= end - length_us]


def _by_name(events: Sequence[Any]) -> list[tuple[str, list[float]]]:
    """The times of each name, those that take longest together first."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in events:
        found[each.name[:_NAME_LEN]].append(each.time_range.elapsed_us())
    return sorted(found.items(), key=lambda pair: -sum(pair[1]))


def _of_name(name: str, times: list[float]) -> Row:
    return {"name": name, "calls a round": len(times) / _ROUNDS, "us a round": sum(times) / _ROUNDS}
