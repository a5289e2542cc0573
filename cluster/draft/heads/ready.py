"""A drafter's head in its host: loaded, in the order of the target's tokens, on its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from cluster.draft.heads.checkpoint import TargetShape
from cluster.draft.heads.load import load_head_of
from cluster.draft.heads.module import HeadModule
from cluster.draft.inside import Host
from cluster.draft.vocabulary import DraftVocabulary, written_vocabulary
from cluster.engine.cpu.packed_linear import choose_kernels, pack_linears
from cluster.models.made_for import MadeFor, folder_made_for
from cluster.models.resolve import resolve_head

Head = TypeVar("Head", bound=HeadModule)


@dataclass(frozen=True, slots=True, eq=False)
class ReadyHead(Generic[Head]):
    """dtype: that the head computes in.  vocabulary: of its logits' columns; None = the target's
    own.  made_for: see `folder_made_for`."""

    head: Head
    vocabulary: DraftVocabulary | None
    dtype: torch.dtype
    made_for: MadeFor


def target_shape(host: Host) -> TargetShape:
    """The sizes that a head in this target must fit."""
    return TargetShape(host.hidden_size, host.vocab_size, host.num_layers)


def ready_head(kind: type[Head], model: str, host: Host) -> ReadyHead[Head]:
    """The head of a drafter's `model`: a folder, or its name on a hub.

    Raises ConfigError where it is none of this kind, or does not fit."""
    folder = resolve_head(model)
    head = load_head_of(kind, folder, target_shape(host), host.weight)
    return made_ready(head, host, folder_made_for(folder))


def made_ready(head: Head, host: Host, made_for: MadeFor) -> ReadyHead[Head]:
    """The head on the target's device, in the numbers that it computes in there.

    On a CPU that is float32, which is nowhere emulated; its weights are packed as the target's are,
    by our kernels where they can be, and so take no more memory than in their file."""
    vocabulary, order = written_vocabulary(head.token_map.numpy(), host.vocab_size)
    if order is not None:
        head.reorder(torch.from_numpy(order))
    if host.device.type != "cpu":
        return ReadyHead(head.to(host.device, host.dtype), vocabulary, host.dtype, made_for)
    head = head.float()
    pack_linears(head, choose_kernels(head))
    return ReadyHead(head, vocabulary, torch.float32, made_for)
