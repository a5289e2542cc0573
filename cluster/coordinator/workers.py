"""Descriptions: checks of workers that join a coordinator, and the coordinator's own.

Whoever connects to a worker has compared its role and protocol (`cluster.rpc.channel`).
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Mapping

from cluster import metrics
from cluster.config.schema import Config
from cluster.coordinator.session import Limits
from cluster.errors import ProtocolError, WorkerError
from cluster.messages import WorkerDescription
from cluster.metrics.recorder import Recorder
from cluster.models.made_for import MadeFor, checkpoint_of

log = logging.getLogger(__name__)

_ALIKE = "serve the same model in the same way"


def check_target(description: WorkerDescription, others: Iterable[WorkerDescription]) -> None:
    """Raise ProtocolError unless all targets serve the same model, and where a text must be the
    same to the bit, by the same machine code."""
    for other in others:
        if checkpoint_of(description.model_hash) != checkpoint_of(other.model_hash):
            _check_equal("model_hash", _ALIKE, description, other)
        for name in ("tokenizer_hash", "vocab_size", "is_reproducible"):
            _check_equal(name, _ALIKE, description, other)
        if description.is_reproducible:
            # Processors may differ in the weights' formats that they multiply.
            _check_equal("model_hash", _ALIKE, description, other)
            remedy = "be built alike for reproducible: true (one image, one kind of processor)"
            _check_equal("native_build", remedy, description, other)


def _check_equal(
    name: str, remedy: str, description: WorkerDescription, other: WorkerDescription
) -> None:
    mine, theirs = getattr(description, name), getattr(other, name)
    if mine != theirs:
        raise ProtocolError(
            f"target {description.worker_id} has {name} {mine}, target {other.worker_id} has "
            f"{theirs}; all targets must {remedy}"
        )


def check_drafter(description: WorkerDescription, target: WorkerDescription | None) -> None:
    """Raise ProtocolError unless the drafter speaks the target's vocabulary, or any."""
    if target is None:
        return
    if not description.tokenizer_hash or not target.tokenizer_hash:
        _check_vocabulary(description, target)
    elif description.tokenizer_hash != target.tokenizer_hash:
        raise ProtocolError(
            f"drafter {description.name} has tokenizer {description.tokenizer_hash[:12]}, the "
            f"target {target.tokenizer_hash[:12]}; use a draft model with the target's tokenizer"
        )


def _check_vocabulary(description: WorkerDescription, target: WorkerDescription) -> None:
    """Sizes only: of models without a tokenizer there is no more to compare."""
    if description.vocab_size and target.vocab_size != description.vocab_size:
        raise ProtocolError(
            f"drafter {description.name} has no tokenizer and {description.vocab_size} tokens, the "
            f"target {target.vocab_size}; use a draft model with the target's tokenizer"
        )


def note_foreign(
    drafters: WorkerDescription, target: WorkerDescription | None, recorder: Recorder
) -> None:
    """Warn of drafters that were made for another target, and count them.

    They may draft: what they draft is verified, but hardly ever accepted.  drafters: a pool drafter
    that joins, or the target itself, of its residents.
    """
    if target is None:
        return
    served = MadeFor(target.name, target.model_hash)
    for name, made_for in drafters.made_for.items():
        if not made_for.fits(served):
            log.warning(
                "drafter %s was made for %s, the target is %s: few of its drafts will be accepted; "
                "train one for this target, or take the drafter out",
                name, made_for, served,
            )  # fmt: skip
            recorder.add(metrics.DRAFTER_FOREIGN, drafter=name)


def limits_of(targets: Iterable[WorkerDescription]) -> Limits | None:
    """Return what every one of `targets` can serve; None without any."""
    served = list(targets)
    if not served:
        return None
    lengths = [each.max_context_len for each in served if each.max_context_len]
    return Limits(min(lengths, default=0), served[0].vocab_size)


async def run_link(work: Awaitable[None], who: str) -> bool:
    """Do the work on a worker's link until it ends.  True when it ended by a failure.

    Whatever a worker sends, nobody else is hurt.
    """
    try:
        await work
    except WorkerError as error:
        log.warning("link broke %s: %s", who, error.message)
    except Exception:
        log.exception("link failed %s", who)
    else:
        return False
    return True


def describe_coordinator(
    worker_id: str, config: Config, target: WorkerDescription | None
) -> WorkerDescription:
    """A coordinator as its ingresses see it; target: one of its targets, None without any."""
    return WorkerDescription(
        worker_id=worker_id,
        role="coordinator",
        name=config.model_name,
        model_hash=target.model_hash if target else "",
        tokenizer_hash=target.tokenizer_hash if target else "",
        vocab_size=target.vocab_size if target else 0,
        max_context_len=target.max_context_len if target else 0,
        max_running_sequences=config.coordinator.max_running_sequences,
        max_batch_tokens=target.max_batch_tokens if target else 0,
    )


def added_up(faults: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Add up faults of drafters, which stand by name and reason."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in faults:
        for name, own in each.items():
            found[name].update(own)
    return {name: dict(own) for name, own in found.items()}
