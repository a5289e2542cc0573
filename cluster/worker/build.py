"""Makes workers from the configuration, under Ray, by hand and in process."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.config.schema import Config
from cluster.draft import registry
from cluster.draft.base import DrafterContext
from cluster.models.engine_state import EngineState
from cluster.models.fingerprint import version_of
from cluster.models.made_for import made_for_of
from cluster.rpc.messages import WorkerDescription
from cluster.worker.draft_worker import DraftWorker
from cluster.worker.models import model_folders, parts_of
from cluster.worker.priority import freeze_gc, importing, pin_to_cores, shorten_switch_interval

if TYPE_CHECKING:
    from cluster.engine.engine import Engine
    from cluster.worker.target import TargetWorker


# Names of the devices that a worker computes on; every worker uses the same names.
#
# Two workers without a common device do not slow each other down.

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Heads of a multiple of it are attended in the same lanes on every processor.
_ALIKE_HEADS = 16


def devices_of(engine: Any = None) -> tuple[str, ...]:
    """The GPUs of `engine` (`cluster.engine.engine.Engine`), or the cores this process may use.

    Containers on one machine see the same names of cores, and do not know which ones they get.
    """
    host, device = _host(), getattr(engine, "device", None)
    if device is None or device.type != "cuda":
        return tuple(f"{host}/cpu{core}" for core in sorted(os.sched_getaffinity(0)))
    import torch

    first = torch.cuda.current_device() if device.index is None else device.index
    # The ranks of a group use all GPUs that the process sees.
    is_group = engine.config.tensor_parallel > 1
    indices = range(torch.cuda.device_count()) if is_group else (first,)
    found = [(index, torch.cuda.get_device_properties(index)) for index in indices]
    # A GPU's index differs between processes that see different GPUs.
    return tuple(f"{host}/gpu-{getattr(gpu, 'uuid', index)}" for index, gpu in found)


def _host() -> str:
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:  # another system than Linux
        return socket.gethostname()


def native_build(engine: Any = None) -> str:
    """Return which machine code of ours `engine` runs, "" = none; see `cluster.cpp.Native`.  The
    sources alone where its bits are the same on every processor (docs/exactness.md)."""
    device = getattr(engine, "device", None)
    if device is None or device.type != "cpu":
        return ""
    from cluster.engine.cpu import kernels

    native = kernels.load()
    if native is None:
        return ""
    is_whole = engine.config.reproducible and engine.model.native is not None
    is_alike = is_whole and all(each.head_dim % _ALIKE_HEADS == 0 for each in engine.layers)
    return f"sources-{native.sources}" if is_alike else native.build


log = logging.getLogger(__name__)


def build_target(engine: Engine, config: Config, worker_id: str = "") -> TargetWorker:
    """A target worker around a loaded engine, not yet started."""
    from cluster.worker.target import TargetWorker
    from cluster.worker.target_parts import TargetParts

    settings = config.target.engine
    parts = TargetParts(engine, config)
    residents = parts.residents
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
        engines=parts.engines,
    )
    return TargetWorker(parts, config, description)


def build_drafter(
    config: Config, name: str, worker_id: str = "", *, beside: bool = False
) -> DraftWorker:
    """The worker of drafter `name`, its model loaded, not yet started.

    beside: while its predecessor drafts in this process.  torch is imported by the kinds that need
    it.  Raises ConfigError for a drafter that cannot run.
    """
    settings = config.drafters[name]
    drafter = registry.build(
        name,
        config.drafters,
        lambda part: DrafterContext(
            part,
            settings.max_nodes,
            settings.max_requests,
            target_model=config.target.engine.model,
            is_stage=part != name,
            beside=beside,
        ),
    )
    engine: Any = getattr(drafter, "engine", None)
    most = settings.max_requests
    if engine:
        most = min(most, engine.config.max_running_sequences)
    description = WorkerDescription(
        worker_id=worker_id or _unique(f"drafter-{name}"),
        role="drafter",
        name=name,
        model_hash=getattr(engine, "model_hash", ""),
        # The coordinator compares it with the target's and refuses another vocabulary.
        tokenizer_hash=getattr(drafter, "tokenizer_hash", getattr(engine, "tokenizer_hash", "")),
        vocab_size=getattr(drafter, "vocab_size", getattr(engine, "vocab_size", 0)),
        max_context_len=getattr(engine, "max_context_len", 0),
        max_running_sequences=most,
        devices=devices_of(engine),
        native_build=native_build(engine),
        made_for={name: made_for_of(drafter)},
        engines=_states(engine),
        written_at=version_of([*model_folders(parts_of(config, name)).values()]).written_at,
    )
    return DraftWorker(drafter, description, nice=settings.nice)


def load_target(config: Config, leader: str, worker_id: str = "") -> TargetWorker:
    """Return the target's worker, not yet started, in a process of its own: rank 0, or all of it.

    leader: host:port at which its ranks gather.
    """
    worker = build_target(load_rank(config, 0, leader), config, worker_id)
    if config.residents:
        shorten_switch_interval()
    freeze_gc()
    return worker


def load_rank(config: Config, rank: int, leader: str) -> Engine:
    """Load one rank of the target; arguments as above."""
    with importing():
        from cluster.engine.cpu.threads import configure_threads
        from cluster.engine.loading.planned import await_room
        from cluster.engine.parallel import init_rank
        from cluster.worker.target_parts import load_target_engine

    engine = config.target.engine
    pin_to_cores(config.target.placement.cores)
    configure_threads(engine)
    if engine.tensor_parallel > 1:
        init_rank(rank, engine.tensor_parallel, leader)
    await_room(engine)
    return load_target_engine(config)


def follow_target(config: Config, rank: int, leader: str) -> None:
    """Run one more rank of a target until rank 0 closes its engine; arguments as above."""
    try:
        load_rank(config, rank, leader).follow()
    finally:
        from cluster.engine.parallel import leave_group

        leave_group()


def load_drafter(
    config: Config, name: str, worker_id: str = "", *, beside: bool = False
) -> DraftWorker:
    """Return the result of `build_drafter`, for a process of its own."""
    pin_to_cores(config.drafters[name].reserved.cores)
    # Only kinds with a model of their own need torch.
    for part, settings in parts_of(config, name).items():
        engine = getattr(registry.check(part, settings), "engine", None)
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


def _states(engine: object) -> tuple[EngineState, ...]:
    """Return the state of a drafter's engine, if it is one of our own kind."""
    if engine is None:
        return ()
    from cluster.engine.engine import Engine
    from cluster.engine.state import engine_state

    return (engine_state(engine),) if isinstance(engine, Engine) else ()
