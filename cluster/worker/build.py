"""Workers from the configuration, the same for every way to run them."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from cluster.config import Config
from cluster.draft import registry
from cluster.draft.base import DrafterContext
from cluster.messages import WorkerDescription
from cluster.worker.devices import devices_of
from cluster.worker.draft import DraftWorker

if TYPE_CHECKING:
    from cluster.engine.engine import Engine
    from cluster.worker.target import TargetWorker


def build_target(engine: Engine, config: Config, worker_id: str = "") -> TargetWorker:
    """A target worker around a loaded engine, not yet started."""
    from cluster.worker.target import TargetWorker
    from cluster.worker.verifier import Verifier

    settings = config.target.engine
    # A fixed budget does not ask what steps cost.
    is_asked = config.coordinator.budget == "adaptive"
    profile = engine.profile_steps() if is_asked else None
    description = WorkerDescription(
        worker_id=worker_id or _unique("target"),
        role="target",
        name=config.model_name,
        model_hash=engine.model_hash,
        tokenizer_hash=engine.tokenizer_hash,
        vocab_size=engine.vocab_size,
        # A text must also fit the pages; better that it ends there than that it is refused there.
        max_context_len=engine.longest_context,
        max_running_sequences=settings.max_running_sequences,
        max_batch_tokens=settings.max_batch_tokens,
        devices=devices_of(engine),
        step_rows=profile.rows if profile else (),
        step_times_s=profile.times_s if profile else (),
        native_build=engine.native_build,
        is_reproducible=settings.reproducible,
    )
    return TargetWorker(Verifier(engine), description)


def build_drafter(config: Config, name: str, worker_id: str = "") -> DraftWorker:
    """The worker of drafter `name`, its model loaded, not yet started.

    torch is imported by the kinds that need it.  Raises ConfigError for a drafter that cannot run.
    """
    settings = config.drafters[name]
    context = DrafterContext(name, settings.max_nodes, settings.max_requests)
    drafter = registry.create(name, settings, context)
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
        tokenizer_hash=engine.tokenizer_hash if engine else "",
        vocab_size=engine.vocab_size if engine else 0,
        max_context_len=engine.max_context_len if engine else 0,
        max_running_sequences=most,
        devices=devices_of(engine),
        native_build=engine.native_build if engine else "",
    )
    return DraftWorker(drafter, description, nice=settings.nice)


def _unique(role: str) -> str:
    """Another one for every process start, so that a worker on a reused port is recognised."""
    return f"{role}-{uuid.uuid4().hex[:12]}"
