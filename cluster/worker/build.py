"""Makes workers from the configuration, under Ray, by hand and in process."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cluster.config.parse import parse
from cluster.config.schema import Config, DrafterConfig, EngineConfig, TargetConfig
from cluster.core import SamplingParams, token_array
from cluster.draft import registry
from cluster.draft.base import DrafterContext
from cluster.draft.breaker import CircuitBreaker
from cluster.errors import ConfigError
from cluster.grammar.compiler import create_compiler
from cluster.messages import AdapterList, WorkerDescription
from cluster.models.engine_state import EngineState
from cluster.models.made_for import made_for_of
from cluster.models.resolve import resolve
from cluster.models.version import version_of
from cluster.records import frozen
from cluster.spec.budget import Ask
from cluster.worker.devices import devices_of, native_build
from cluster.worker.draft_worker import DraftWorker
from cluster.worker.grammars import Grammars
from cluster.worker.priority import freeze_gc, importing, pin_to_cores, shorten_switch_interval
from cluster.worker.residents import ResidentDrafter, Residents
from cluster.worker.swap import Swaps, model_folders
from cluster.worker.texts import measured_text

if TYPE_CHECKING:
    from cluster.engine.engine import Engine
    from cluster.spec.step_profile import DraftTime, StepProfile
    from cluster.worker.target import TargetWorker
    from cluster.worker.verifier import Verifier

log = logging.getLogger(__name__)

# The most characters of the reason why a drafter is refused; the target's description contains it.
_MAX_REFUSAL_LEN = 1000


@frozen
class TargetParts:
    """A target's engine and drafters, ready to serve.

    refused: why drafters cannot draft, by name.  profile, draft_times: the times of its steps and
    of its residents, measured here; nothing where the budget does not use them.
    """

    verifier: Verifier
    residents: Residents
    refused: Mapping[str, str]
    grammars: Grammars
    profile: StepProfile | None
    draft_times: tuple[DraftTime, ...]


def target_parts(engine: Engine, config: Config) -> TargetParts:
    """Load what drafts inside a target beside its engine, and measure both."""
    from cluster.engine.loading import progress
    from cluster.worker.draft_profile import profile_drafting
    from cluster.worker.verifier import Verifier

    settings = config.target.engine
    # A fixed budget does not use step times.
    is_asked = config.coordinator.budget == "adaptive"
    if is_asked:
        progress.begin("profile")
    profile = engine.profile_steps() if is_asked else None
    compiler = create_compiler(
        resolve(settings.model), config.answers, engine.vocab_size, engine.eos_token_ids
    )
    grammars = Grammars(compiler, engine.vocab_size, engine.eos_token_ids)
    residents, refused = _residents(engine, config, grammars)
    engine.capture_ahead(residents.wants.taps)
    verifier = Verifier(
        engine, open_hook=grammars.open_hook, wants=residents.wants,
        num_top=lambda text: max(
            (each.num_top(text.id, text.opened.tenant) for each in residents), default=0
        ),
    )  # fmt: skip
    times = (
        profile_drafting(verifier, residents, engine.vocab_size, settings.max_running_sequences)
        if is_asked
        else ()
    )
    return TargetParts(verifier, residents, refused, grammars, profile, times)


def build_target(engine: Engine, config: Config, worker_id: str = "") -> TargetWorker:
    """A target worker around a loaded engine, not yet started."""
    from cluster.plan.controller import Controller
    from cluster.plan.roster import Roster
    from cluster.plan.scores import DraftScores
    from cluster.worker.target import TargetWorker

    settings, pace = config.target.engine, config.coordinator
    parts = target_parts(engine, config)
    residents = parts.residents
    scores = DraftScores(Roster.of(config, residents.names))
    own_state = _state_of(engine, parts.verifier)
    description = WorkerDescription(
        worker_id=worker_id or _unique("target"),
        role="target",
        name=config.model_name,
        model_hash=engine.model_hash,
        tokenizer_hash=engine.tokenizer_hash,
        vocab_size=engine.vocab_size,
        # A text must also fit the pages: with this limit it ends there and is not refused.
        max_context_len=engine.longest_context,
        max_running_sequences=settings.max_running_sequences,
        max_batch_tokens=settings.max_batch_tokens,
        devices=devices_of(engine),
        native_build=native_build(engine),
        is_reproducible=settings.reproducible,
        residents=residents.names,
        refused=parts.refused,
        made_for={each.name: each.made_for for each in residents},
        engines=(own_state, *_states(residents.engines)),
    )
    worker = TargetWorker(
        parts.verifier, description,
        Controller(pace, parts.profile, parts.draft_times, scores), residents,
        max_draft_tokens=pace.max_draft_tokens, silence_s=pace.target_silence_s,
        prepare=parts.grammars.prepare,
    )  # fmt: skip
    worker.streams.announce(AdapterList(engine.adapters.references))

    def exchange(drafters: Sequence[ResidentDrafter]) -> Sequence[ResidentDrafter]:
        former = worker.exchange(drafters)
        worker.use_engines((own_state, *_states(residents.engines)))
        return former

    worker.swaps = Swaps(
        engine, config, residents,
        lambda wanted, name: _resident(engine, wanted, name, parts.grammars, beside=True),
        exchange, worker.use,
    )  # fmt: skip
    return worker


def _state_of(engine: Engine, verifier: Verifier) -> EngineState:
    """Return the state of the target's own engine."""
    from cluster.engine.state import TORCH, engine_state

    if engine.device.type == "cuda" and verifier.drawn_by == TORCH:
        engine.forward.note_fallback("draws: torch draws, because the Triton kernel cannot run")
    return engine_state(engine, draws=verifier.drawn_by)


def _states(engines: Mapping[str, object]) -> tuple[EngineState, ...]:
    """Return the states of drafters' engines, with their names, for engines of our own kind."""
    if not engines:
        return ()
    from cluster.engine.engine import Engine
    from cluster.engine.state import engine_state

    return tuple(engine_state(e, name) for name, e in engines.items() if isinstance(e, Engine))


def _residents(
    engine: Engine, config: Config, grammars: Grammars
) -> tuple[Residents, dict[str, str]]:
    """Make the drafters inside the target, with their models loaded beside the target's.

    Returns those that can draft, and for each of the others why it cannot; the target serves
    without these.
    """
    found: list[ResidentDrafter] = []
    refused: dict[str, str] = {}
    for name in config.residents:
        try:
            found.append(_resident(engine, config, name, grammars))
        except ConfigError as error:
            log.error("drafter refused name=%s: %s", name, error.message)
            refused[name] = error.message[:_MAX_REFUSAL_LEN]
    for each in found:
        each.begin()
    return Residents(found), refused


def _resident(
    engine: Engine, config: Config, name: str, grammars: Grammars, *, beside: bool = False
) -> ResidentDrafter:
    from cluster.worker.host import EngineHost

    parts = {each: config.drafters[each] for each in (name, *config.drafters[name].stages)}
    settings = {each: _beside(engine, own, each) for each, own in parts.items()}
    limits = config.coordinator

    def context_of(part: str) -> DrafterContext:
        return DrafterContext(
            part, parts[name].max_nodes, parts[name].max_requests, engine.vocab_size,
            engine.tokenizer_hash, EngineHost(engine, config, part), grammars.text,
            target_model=config.target.engine.model, is_stage=part != name, beside=beside,
        )  # fmt: skip

    drafter = registry.build(name, settings, context_of)
    breaker = CircuitBreaker(limits.breaker_failures, limits.breaker_reset_s)
    is_believed = registry.has_laws(parts[name].kind)
    resident = ResidentDrafter(
        name, drafter, engine.vocab_size, breaker, is_believed=is_believed,
        model=version_of([*model_folders(parts).values()]),
    )  # fmt: skip
    engine.model.resolve_taps(resident.wants.taps)  # raises for taps that the target lacks
    if resident.engine is not None:
        _warm_up(resident)
    return resident


def _warm_up(resident: ResidentDrafter) -> None:
    """Draft once without a request, because a model's first steps take longer than the rest."""
    params, names = SamplingParams(temperature=0.0), (resident.name,)
    text = measured_text("", token_array([0] * 8), params, names)
    text.ask = Ask(4)
    resident.draft([text], math.inf, time.perf_counter() + 1.0)
    resident.forget([text.id])
    resident.mean_s = 0.0


def _beside(engine: Engine, settings: DrafterConfig, name: str) -> DrafterConfig:
    """Return the settings with which a draft model runs in the target's process."""
    own = settings.options.get("engine")
    if not isinstance(own, Mapping):
        return settings
    path = f"drafters.{name}.options.engine"
    parsed = parse(EngineConfig, own, path)
    if parsed.tensor_parallel > 1:
        raise ConfigError(
            f"{path}.tensor_parallel: {parsed.tensor_parallel} ranks cannot run inside the target; "
            "set it to 1",
            param=f"{path}.tensor_parallel",
        )
    from cluster.worker.host import beside

    changes = {"device": str(engine.device), **beside(parsed, engine.device)}
    return replace(settings, options={**settings.options, "engine": {**own, **changes}})


def build_drafter(
    config: Config, name: str, worker_id: str = "", *, beside: bool = False
) -> DraftWorker:
    """The worker of drafter `name`, its model loaded, not yet started.

    beside: while its predecessor drafts in this process.  torch is imported by the kinds that need
    it.  Raises ConfigError for a drafter that cannot run.
    """
    settings = config.drafters[name]
    parts = {each: config.drafters[each] for each in (name, *settings.stages)}
    drafter = registry.build(
        name, config.drafters,
        lambda part: DrafterContext(
            part, settings.max_nodes, settings.max_requests,
            target_model=config.target.engine.model, is_stage=part != name, beside=beside,
        ),
    )  # fmt: skip
    engine: Any = getattr(drafter, "engine", None)
    most = settings.max_requests
    if engine:
        most = min(most, engine.config.max_running_sequences)
    description = WorkerDescription(
        worker_id=worker_id or _unique(f"drafter-{name}"),
        role="drafter",
        name=name,
        model_hash=engine.model_hash if engine else "",
        # The coordinator compares it with the target's and refuses another vocabulary.
        tokenizer_hash=getattr(drafter, "tokenizer_hash", engine.tokenizer_hash if engine else ""),
        vocab_size=getattr(drafter, "vocab_size", engine.vocab_size if engine else 0),
        max_context_len=engine.max_context_len if engine else 0,
        max_running_sequences=most,
        devices=devices_of(engine),
        native_build=native_build(engine),
        made_for={name: made_for_of(drafter)},
        engines=_states({"": engine} if engine else {}),
        written_at=version_of([*model_folders(parts).values()]).written_at,
    )
    return DraftWorker(drafter, description, nice=settings.nice)


def load_target(config: Config, leader: str, local_rank: int | None = None) -> Engine:
    """Load the target, or rank 0 of it, in a process of its own.

    leader: host:port at which its ranks gather.  local_rank: as for `init_rank`.
    """
    with importing():
        from cluster.engine.cpu.threads import configure_threads
        from cluster.engine.parallel import init_rank
        from cluster.worker.host import load_target_engine

    engine = config.target.engine
    pin_to_cores(config.target.placement.cores)
    configure_threads(engine)
    if engine.tensor_parallel > 1:
        init_rank(0, engine.tensor_parallel, leader, local_rank=local_rank)
    return load_target_engine(config)


def follow_target(
    target: TargetConfig, rank: int, leader: str, local_rank: int | None = None
) -> None:
    """Run one more rank of a target until rank 0 closes its engine; arguments as above."""
    with importing():
        from cluster.engine.cpu.threads import configure_threads
        from cluster.engine.engine import Engine
        from cluster.engine.parallel import init_rank, leave_group

    pin_to_cores(target.placement.cores)
    configure_threads(target.engine)
    init_rank(rank, target.engine.tensor_parallel, leader, local_rank=local_rank)
    try:
        Engine.load(target.engine).follow()
    finally:
        leave_group()


def load_drafter(
    config: Config, name: str, worker_id: str = "", *, beside: bool = False
) -> DraftWorker:
    """Return the result of `build_drafter`, for a process of its own."""
    pin_to_cores(config.drafters[name].reserved.cores)
    # Only kinds with a model of their own need torch.
    for part in (name, *config.drafters[name].stages):
        engine = getattr(registry.check(part, config.drafters[part]), "engine", None)
        if engine is not None:
            from cluster.engine.cpu.threads import configure_threads

            configure_threads(engine)
    shorten_switch_interval()
    worker = build_drafter(config, name, worker_id, beside=beside)
    freeze_gc()
    return worker


def _unique(role: str) -> str:
    """A new id for every start, so that another worker on a reused port is recognised."""
    return f"{role}-{uuid.uuid4().hex[:12]}"
