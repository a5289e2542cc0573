"""What a target's process holds beside its engine: the drafters inside it, its grammars and its
verifier.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import psutil
import torch

from cluster.config.parse import parse
from cluster.config.schema import Config, DrafterConfig, EngineConfig
from cluster.core import SamplingParams, token_array
from cluster.draft import registry
from cluster.draft.base import DrafterContext
from cluster.draft.breaker import CircuitBreaker
from cluster.draft.host import Host, beside_target, layers_of
from cluster.engine.device import resolve_device, return_freed_memory
from cluster.engine.engine import Engine
from cluster.engine.loading import progress
from cluster.engine.loading.model import LoadedModel
from cluster.engine.state import TORCH, engine_state
from cluster.engine.types import LayerSpec
from cluster.errors import ConfigError
from cluster.grammar.compiler import GrammarCompiler
from cluster.models.engine_state import EngineState
from cluster.models.fingerprint import version_of
from cluster.models.resolve import resolve
from cluster.records import frozen
from cluster.spec.budget import Ask
from cluster.spec.step_profile import MeasuredCosts
from cluster.worker.draft_profile import plain_turn_s, profile_drafting
from cluster.worker.models import model_folders, parts_of
from cluster.worker.residents import ResidentDrafter, Residents
from cluster.worker.texts import measured_text
from cluster.worker.verifier import Verifier

log = logging.getLogger(__name__)

# The most characters of the reason why a drafter is refused; the target's description contains it.
_MAX_REFUSAL_LEN = 1000


def load_target_engine(config: Config) -> Engine:
    """Load the target's engine, on its only or first rank, with the layers that residents want in
    its KV cache, in the order of `Config.hosted`."""

    def layers(model: LoadedModel) -> list[LayerSpec]:
        own = (layers_of(config, name, model.layers[0]) for name in config.hosted)
        return list(itertools.chain.from_iterable(own))

    return Engine.load(config.target.engine, extra_layers=layers)


class TargetParts:
    """Made and measured around a loaded engine.

    refused: why drafters cannot draft, by name; the target serves without these.  profile,
    draft_times: the times of its steps and of its residents, measured here; nothing where the
    budget does not use them.
    """

    def __init__(self, engine: Engine, config: Config) -> None:
        settings = config.target.engine
        # A fixed budget does not use step times.
        is_timed = config.coordinator.budget == "adaptive"
        if is_timed:
            progress.begin("profile")
        self.engine = engine
        self.profile = engine.profile_steps() if is_timed else None
        self.grammars = grammars = GrammarCompiler(
            resolve(settings.model), config.answers, engine.vocab_size, engine.eos_token_ids
        )
        self.refused: dict[str, str] = {}
        found: list[ResidentDrafter] = []
        for name in config.residents:
            try:
                found.append(self.resident(config, name))
            except ConfigError as error:
                log.error("drafter refused name=%s: %s", name, error.message)
                self.refused[name] = error.message[:_MAX_REFUSAL_LEN]
        for each in found:
            each.begin()
        residents = self.residents = Residents(found)
        engine.capture_ahead(residents.wants.taps)
        self.verifier = Verifier(
            engine,
            open_hook=lambda text: grammars.hook(text.params.grammar),
            prepare=lambda params: grammars.prepare(params.grammar) if params.grammar else None,
            wants=residents.wants,
            num_top=lambda text: max(
                (each.num_top(text.id, text.opened.tenant) for each in residents), default=0
            ),
        )
        self.draft_times = (
            profile_drafting(
                self.verifier, residents, engine.vocab_size, settings.max_running_sequences
            )
            if is_timed
            else ()
        )
        drawn_by = self.verifier.drawn_by
        if engine.device.type == "cuda" and drawn_by == TORCH:
            engine.forward.note_fallback("draws: torch draws, because the Triton kernel cannot run")
        self._own_state = engine_state(engine, draws=drawn_by)

    @property
    def engines(self) -> tuple[EngineState, ...]:
        """The states of the target's engine and of its drafters', those of our own kind."""
        others = [
            engine_state(each.engine, each.name)
            for each in self.residents
            if isinstance(each.engine, Engine)
        ]
        return self._own_state, *others

    def resident(
        self, config: Config, name: str, *, beside: bool = False, num_pages: int = 0
    ) -> ResidentDrafter:
        """Make a drafter by a configuration, ready to draft.  Raises ConfigError.

        beside: while its predecessor drafts.  num_pages: of its cache, if its own options do not
        say; 0 = as many as there is room for."""
        engine, parts, limits = self.engine, parts_of(config, name), config.coordinator
        settings = {each: self._settled(own, each, num_pages) for each, own in parts.items()}
        drafter = registry.build(
            name,
            settings,
            lambda part: DrafterContext(
                part,
                parts[name].max_nodes,
                parts[name].max_requests,
                engine.vocab_size,
                engine.tokenizer_hash,
                Host(engine, config, part),
                self.grammars.text,
                target_model=config.target.engine.model,
                is_stage=part != name,
                beside=beside,
            ),
        )
        resident = ResidentDrafter(
            name,
            drafter,
            engine.vocab_size,
            CircuitBreaker(limits.breaker_failures, limits.breaker_reset_s),
            is_believed=registry.has_laws(parts[name].kind),
            model=version_of([*model_folders(parts).values()]),
        )
        engine.model.resolve_taps(resident.wants.taps)  # raises for taps that the target lacks
        if resident.engine is not None:
            # Draft once without a request: a model's first steps take longer than the rest.
            params = SamplingParams(temperature=0.0)
            text = measured_text("", token_array([0] * 8), params, (name,))
            text.ask = Ask(4)
            resident.draft([text], math.inf, time.perf_counter() + 1.0)
            resident.forget([text.id])
            resident.mean_s = 0.0
        return resident

    def _settled(self, settings: DrafterConfig, name: str, num_pages: int) -> DrafterConfig:
        """Return the settings with which a draft model runs in the target's process."""
        own, device = settings.options.get("engine"), self.engine.device
        if not isinstance(own, Mapping):
            return settings
        path = f"drafters.{name}.options.engine"
        parsed = parse(EngineConfig, own, path)
        if parsed.tensor_parallel > 1:
            raise ConfigError(
                f"{path}.tensor_parallel: {parsed.tensor_parallel} ranks cannot run inside the "
                "target; set it to 1",
                param=f"{path}.tensor_parallel",
            )
        num_pages = parsed.num_pages or num_pages
        changes = {"device": str(device), "num_pages": num_pages, **beside_target(parsed, device)}
        return replace(settings, options={**settings.options, "engine": {**own, **changes}})


# What the whole of one target process takes, for `drafthouse plan --measure`: nobody is served.


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
        loaded = _in_use(device)
        parts = TargetParts(engine, config)
        residents = parts.residents
        asked = config.drafters_of(task)
        timed = [each for each in residents if each.name in asked]
        if parts.profile is None:
            raise ConfigError.at("target.engine.model", "its steps cannot be timed here")
        ready = _in_use(device)
        full = _filled([engine, *(each.engine for each in residents)], device)
        profiles = [
            each.engine.profile_steps() for each in timed if isinstance(each.engine, Engine)
        ]
        costs = MeasuredCosts(
            parts.profile,
            [each for each in parts.draft_times if each.drafter in asked],
            [each for each in profiles if each is not None],
            max(plain_turn_s(parts.verifier, engine.vocab_size) - parts.profile.times_s[0], 0.0),
        )
        return MeasuredTrial(
            loaded - before,
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
