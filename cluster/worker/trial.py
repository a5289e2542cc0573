"""Loads a configuration's target with its residents, as a worker does, and measures what they take.

For `drafthouse plan --measure`: nobody is served.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace

import psutil
import torch

from cluster.config.schema import Config
from cluster.engine.device import resolve_device, return_freed_memory
from cluster.engine.engine import Engine
from cluster.errors import ConfigError
from cluster.records import frozen
from cluster.spec.step_profile import MeasuredCosts
from cluster.worker.draft_profile import plain_turn_s
from cluster.worker.host import load_target_engine
from cluster.worker.target_parts import TargetParts


@frozen
class MeasuredTrial:
    """What was measured.

    Bytes, each beside those before it, on a GPU of its memory: weights, with what the engine needs
    to make steps; drafters, with what steps of all sizes take; kv_cache, the part of the KV caches
    that is not in those yet.  with_models: draft models were timed, not look-ups alone.  refused:
    why drafters cannot draft, by name.
    """

    weights: int
    drafters: int
    kv_cache: int
    costs: MeasuredCosts
    with_models: bool
    refused: Mapping[str, str]


def try_here(config: Config, task: str) -> MeasuredTrial:
    """Load everything that one target process holds, and measure it; takes as long as a start.

    task: whose drafters are timed.  Raises ConfigError for a model that cannot be loaded, or whose
    steps cannot be timed."""
    # A fixed budget uses no step times, so none would be measured.
    config = replace(config, coordinator=replace(config.coordinator, budget="adaptive"))
    device = resolve_device(config.target.engine.device)
    before = _in_use(device)
    engine = load_target_engine(config)
    try:
        loaded = _in_use(device) - before
        parts = TargetParts(engine, config)
        residents = parts.residents
        timed = [each for each in residents if each.name in config.drafters_of(task)]
        names = [each.name for each in timed]
        if parts.profile is None:
            raise ConfigError.at("target.engine.model", "its steps cannot be timed here")
        ready = _in_use(device) - before
        full = _filled([engine, *(each.engine for each in residents)], device) - before
        models = [each.engine for each in timed if isinstance(each.engine, Engine)]
        profiles = [each.profile_steps() for each in models]
        costs = MeasuredCosts(
            parts.profile,
            [each for each in parts.draft_times if each.drafter in names],
            [each for each in profiles if each is not None],
            max(plain_turn_s(parts.verifier, engine.vocab_size) - parts.profile.times_s[0], 0.0),
        )
        return MeasuredTrial(
            loaded,
            ready - loaded,
            full - ready,
            costs,
            not all(each.member.is_look_up for each in timed),
            parts.refused,
        )
    finally:
        engine.close()


def _filled(engines: Sequence[object], device: torch.device) -> int:
    """Return the memory in use once every page of the KV caches is: on a CPU a page takes memory
    when it is first written."""
    for engine in engines:
        if device.type == "cpu" and isinstance(engine, Engine):
            for layer in engine.cache.layers:
                layer.zero_()
    return _in_use(device)


def _in_use(device: torch.device) -> int:
    """Return the bytes in use; on a GPU the most that have been."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    gc.collect()
    return_freed_memory()
    return resident_bytes()


def resident_bytes() -> int:
    """Return the memory that this process takes."""
    return int(psutil.Process().memory_info().rss)
