"""One function for every published draft head, `load_draft_head(folder, target, ...)`; and the head
in its host: in the order of the target's tokens, on its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from cluster.draft.heads import block_files, eagle3, exit, medusa, peagle
from cluster.draft.heads.block import BlockHead
from cluster.draft.heads.checkpoint import (
    TargetShape,
    TargetWeight,
    TensorReader,
    read_config,
    read_shapes,
    read_tensors,
    refused,
)
from cluster.draft.heads.layers import HeadModule
from cluster.draft.inside import Host
from cluster.draft.vocabulary import DraftVocabulary, written_vocabulary
from cluster.engine.cpu.packed_linear import choose_kernels, pack_linears
from cluster.engine.loading.model_config import BAD_VALUES, keys_in, reason_of
from cluster.models.made_for import MadeFor, folder_made_for
from cluster.models.resolve import resolve_head

Head = TypeVar("Head", bound=nn.Module)
Module = TypeVar("Module", bound=HeadModule)
DraftHead = eagle3.Eagle3Head | medusa.MedusaHead | BlockHead | exit.ExitHead

# Architectures and keys of heads that we know by name and do not serve.
_REFUSED = {
    "dflash2": "a DFlash-2 block drafter",
    "domino": "a Domino block drafter",
    "jetspec": "a JetSpec block drafter",
}
_Load = Callable[[Path, Mapping[str, Any], TargetShape, TargetWeight, TensorReader], DraftHead]
# By the drafters that load a head's folder: the head, what reads it, and what it is called.
_KINDS: Mapping[str, tuple[type[nn.Module], _Load, str]] = {
    "eagle3": (eagle3.Eagle3Head, eagle3.load, "EAGLE-3 head"),
    "peagle": (peagle.ParallelHead, peagle.load, "P-EAGLE head"),
    "medusa": (medusa.MedusaHead, medusa.load, "Medusa heads"),
    "block": (BlockHead, block_files.load, "DFlash or DSpark drafter"),
    "early_exit": (exit.ExitHead, exit.load, "early exit"),
}
_OF_DFLASH_2 = ("candidate_selector", "selector_rank")


def format_of(folder: Path, config: Mapping[str, Any]) -> str:
    """The kind of a folder, one of _KINDS; raises ConfigError for others, by their names."""
    architectures = " ".join(map(str, config.get("architectures") or ()))
    said = f"{architectures} {config.get('speculators_model_type', '')}".lower()
    block = config.get("dflash_config") or {}
    said += f" {config.get('projector_type', block.get('projector_type', ''))}".lower()
    for word, name in _REFUSED.items():
        if word in said or f"{word}_config" in config:
            raise refused(folder, f"it is {name}, which is not served")
    if any(key in each for key in _OF_DFLASH_2 for each in (config, block)):
        raise refused(folder, "it is a DFlash-2 block drafter, which is not served")
    if exit.ARCHITECTURE in architectures:
        return "early_exit"
    if "dflash" in said or "dspark" in said:
        return "block"
    if "eagle3" in said or "peagle" in said:
        return "peagle" if peagle.is_parallel(config) else "eagle3"
    if "eagle" in said:
        raise refused(
            folder, "it is an EAGLE head of the first or second kind, which is not served"
        )
    if config.get("speculators_model_type") == "mtp" or "mtp_num_hidden_layers" in config:
        raise refused(
            folder, "it is a layer for multi-token prediction apart from its target; such a layer "
            "is drafted from (kind: mtp) where it lies in the target's own checkpoint",
        )  # fmt: skip
    if "medusa_num_heads" in config or "medusa" in said or config.get("model_type") == "medusa":
        return "medusa"
    if config.get("num_hidden_layers") == 1:
        # Such folders have the configuration of an ordinary model.
        raise refused(
            folder, "it is a model of one layer, as EAGLE heads of the first and second kind are, "
            "which are not served; EAGLE-3 and Medusa folders are",
        )  # fmt: skip
    raise refused(
        folder,
        f"it is no draft head that we know (architectures: {architectures or 'none'}); "
        "EAGLE-3, Medusa, DFlash and DSpark folders are",
    )


def load_draft_head(
    folder: Path, target: TargetShape, weight: TargetWeight, read: TensorReader = read_tensors
) -> DraftHead:
    """The draft head of a folder, checked against the target.

    weight: asked for what a folder leaves out.  read: `read_shapes` gives a head without weights,
    to see whether it would fit.  Raises ConfigError that names the folder and what does not fit: a
    size, a vocabulary, a tensor missing or left over.
    """
    config = read_config(folder)
    try:
        _, load, _ = _KINDS[format_of(folder, config)]
        return load(folder, config, target, weight, read)
    except BAD_VALUES as error:
        named = "".join(f"{key}: " for key in keys_in(str(error), config))
        raise refused(folder, f"config.json: {named}{reason_of(error)}") from error


def load_head_of(
    kind: type[Head], folder: Path, target: TargetShape, weight: TargetWeight,
    read: TensorReader = read_tensors,
) -> Head:  # fmt: skip
    """`load_draft_head` of a folder that must hold this kind of head."""
    head = load_draft_head(folder, target, weight, read)
    # A P-EAGLE head is of EAGLE-3's class too, but draws nothing of use one token at a time.
    if type(head) is not kind:
        form = format_of(folder, read_config(folder))
        wanted = next(name for each, _, name in _KINDS.values() if each is kind)
        raise refused(folder, f"it holds no {wanted}; it is read by the kind of drafter {form}")
    return head


def check_draft_head(kind: str, folder: Path, target: TargetShape) -> None:
    """Raise ConfigError as `load_head_of` would, from configuration, headers and vocabulary maps.

    kind: of the drafter, as the configuration names it.
    """
    shape = (target.vocab_size, target.hidden_size)
    load_head_of(
        _KINDS[kind][0], folder, target, lambda name: torch.empty(shape, device="meta"), read_shapes
    )


@dataclass(frozen=True, slots=True, eq=False)
class ReadyHead(Generic[Module]):
    """dtype: that the head computes in.  vocabulary: of its logits' columns; None = the target's
    own.  made_for: see `folder_made_for`."""

    head: Module
    vocabulary: DraftVocabulary | None
    dtype: torch.dtype
    made_for: MadeFor


def target_shape(host: Host) -> TargetShape:
    """The sizes that a head in this target must fit."""
    return TargetShape(host.hidden_size, host.vocab_size, host.num_layers)


def ready_head(kind: type[Module], model: str, host: Host) -> ReadyHead[Module]:
    """The head of a drafter's `model`: a folder, or its name on a hub.

    Raises ConfigError where it is none of this kind, or does not fit."""
    folder = resolve_head(model)
    head = load_head_of(kind, folder, target_shape(host), host.weight)
    return made_ready(head, host, folder_made_for(folder))


def made_ready(head: Module, host: Host, made_for: MadeFor) -> ReadyHead[Module]:
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
