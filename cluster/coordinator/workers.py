"""Checks of what joins a coordinator."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.core import PROTOCOL_VERSION, WorkerDescription
from cluster.errors import ProtocolError


def check_target(description: WorkerDescription, others: Iterable[WorkerDescription]) -> None:
    """Raise ProtocolError unless all targets serve the same model."""
    _check_role(description, "target")
    for other in others:
        for name in ("model_hash", "tokenizer_hash", "vocab_size"):
            mine, theirs = getattr(description, name), getattr(other, name)
            if mine != theirs:
                raise ProtocolError(
                    f"target {description.worker_id} has {name} {mine}, target "
                    f"{other.worker_id} has {theirs}; all targets must serve the same model"
                )


def check_drafter(description: WorkerDescription, target: WorkerDescription | None) -> None:
    """Raise ProtocolError unless the drafter speaks the target's vocabulary, or any."""
    _check_role(description, "drafter")
    if target is None or not description.tokenizer_hash or not target.tokenizer_hash:
        return
    if description.tokenizer_hash != target.tokenizer_hash:
        raise ProtocolError(
            f"drafter {description.name} has tokenizer {description.tokenizer_hash[:12]}, the "
            f"target {target.tokenizer_hash[:12]}; use a draft model with the target's tokenizer"
        )


def _check_role(description: WorkerDescription, role: str) -> None:
    if description.role != role:
        raise ProtocolError(f"worker {description.worker_id} is a {description.role}, not a {role}")
    if description.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"worker {description.worker_id} speaks protocol {description.protocol_version}, this "
            f"coordinator {PROTOCOL_VERSION}; run the same release everywhere"
        )
