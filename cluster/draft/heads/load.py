"""One function for every published draft head, `load_draft_head(folder, target, ...)`; and the head
in its host, on its device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cluster.draft.heads import block, eagle3, exit, medusa, mtp
from cluster.draft.heads.checkpoint import META, HeadConfig, HeadTarget
from cluster.draft.host import Host
from cluster.draft.vocabulary import DraftVocabulary, written_vocabulary
from cluster.engine.cpu.narrow import keep_in_bf16
from cluster.engine.cpu.packed_linear import choose_kernels, pack_linears
from cluster.engine.device import convert
from cluster.engine.loading.model_config import BAD_VALUES, keys_in, reason_of
from cluster.models.made_for import MadeFor, folder_made_for
from cluster.models.resolve import resolve, resolve_head

# Architectures and keys of heads that we know by name and do not serve.
_REFUSED = {
    "domino": "a Domino block drafter, which is not served",
    "jetspec": "a JetSpec block drafter, which is not served",
    "eagle4": "an EAGLE-4 head, of which neither the format nor any code was published by November "
    "2026; draft with an EAGLE-3 head of this target",
}
# By the drafters that load a head: the module that reads it, and what it is called.
_KINDS: Mapping[str, tuple[Any, str]] = {
    "eagle3": (eagle3, "EAGLE-3 head"),
    "peagle": (eagle3, "P-EAGLE head"),
    "medusa": (medusa, "Medusa heads"),
    "block": (block, "DFlash or DSpark drafter"),
    "early_exit": (exit, "early exit"),
    "mtp": (mtp, "layer for multi-token prediction"),
}


def format_of(config: HeadConfig) -> str:
    """The kind of a folder, one of _KINDS; raises ConfigError for others, by their names."""
    data = config.data
    said = f"{config.words} {config.said('projector_type', default='')}".lower()
    for word, name in _REFUSED.items():
        if word in said.replace("-", "") or f"{word}_config" in data:
            raise config.refused(f"it is {name}")
    if exit.ARCHITECTURE in config.architectures:
        return "early_exit"
    if "dflash" in said or "dspark" in said:
        return "block"
    if "eagle3" in said or "peagle" in said:
        return "peagle" if eagle3.is_parallel(config) else "eagle3"
    if "eagle" in said:
        raise config.refused("it is an EAGLE head of the first or second kind, which is not served")
    if data.get("speculators_model_type") == "mtp" or "mtp_num_hidden_layers" in data:
        raise config.refused(
            "it is a layer for multi-token prediction apart from its target; such a layer is "
            "drafted from (kind: mtp) where it lies in the target's own checkpoint"
        )
    if "medusa_num_heads" in data or "medusa" in said or data.get("model_type") == "medusa":
        return "medusa"
    if data.get("num_hidden_layers") == 1:
        # Such folders have the configuration of an ordinary model.
        raise config.refused(
            "it is a model of one layer, as EAGLE heads of the first and second kind are, which "
            "are not served; EAGLE-3 and Medusa folders are"
        )
    raise config.refused(
        f"it is no draft head that we know (architectures: {config.architectures or 'none'}); "
        "EAGLE-3, Medusa, DFlash and DSpark folders are"
    )


def load_draft_head(folder: Path, target: HeadTarget, wanted: str = "") -> Any:
    """The draft head of a folder, checked against the target.

    wanted: the one kind that it may be of, "" = any but mtp, whose folder is the target's own.
    Raises ConfigError that names the folder and what does not fit: a kind, a size, a vocabulary, a
    tensor missing or left over.
    """
    config = HeadConfig(folder)
    try:
        kind = wanted if wanted == "mtp" else format_of(config)
        head = _KINDS[kind][0].load(config, target)
    except BAD_VALUES as error:
        named = "".join(f"{key}: " for key in keys_in(str(error), config.data))
        raise config.refused(f"config.json: {named}{reason_of(error)}") from error
    if kind != (wanted or kind):
        raise config.refused(
            f"it holds no {_KINDS[wanted][1]}; it is read by the kind of drafter {kind}"
        )
    return head


def check_draft_head(
    kind: str, folder: Path, hidden_size: int, vocab_size: int, num_layers: int
) -> None:
    """Raise ConfigError as loading it would, from configuration, headers and vocabulary maps.

    kind: of the drafter, as the configuration names it.  The sizes are the target's.
    """
    like = torch.empty(vocab_size, hidden_size, device=META)
    target = HeadTarget(hidden_size, vocab_size, num_layers, lambda name: like, META)
    load_draft_head(folder, target, kind)


def head_target(host: Host) -> HeadTarget:
    """The target that a head in this host must fit."""
    return HeadTarget(host.hidden_size, host.vocab_size, host.num_layers, host.weight)


def folder_of(kind: str, model: str) -> Path:
    """The folder of a drafter's `model`: a layer for multi-token prediction is in the target's."""
    return resolve(model) if kind == "mtp" else resolve_head(model)


def layers_of(kind: str, model: str) -> Any:
    """The configuration of the decoder layers of a drafter's `model`."""
    return _KINDS[kind][0].layers_of(HeadConfig(folder_of(kind, model)))


def ready_head(
    kind: str, model: str, host: Host
) -> tuple[Any, DraftVocabulary | None, torch.dtype, MadeFor]:
    """The head of a drafter's `model`, on the target's device, in the numbers that it computes in
    there; raises ConfigError where it is none of this kind, or does not fit.  Returns with it the
    vocabulary of its logits' columns, None = the target's own, these numbers, and the target that
    it was made for.

    On a CPU that is float32, which is nowhere emulated; its weights are packed as the target's are,
    by our kernels where they can be, and so take no more memory than in their file."""
    folder = folder_of(kind, model)
    head = load_draft_head(folder, head_target(host), kind)
    made_for = MadeFor() if kind == "mtp" else folder_made_for(folder)
    vocabulary = written_vocabulary(head.token_map.numpy(), host.vocab_size)
    if host.device.type != "cpu":
        convert(head.to(host.device), host.dtype)
        return head, vocabulary, host.dtype, made_for
    _widen(head)
    pack_linears(head, choose_kernels(head))
    return head, vocabulary, torch.float32, made_for


def _widen(head: torch.nn.Module) -> None:
    """Turn the head into float32, but for an embedding in bfloat16: it may be the target's own."""
    embedding = getattr(head, "embed_tokens", None)
    if embedding is None or embedding.weight.dtype != torch.bfloat16:
        head.float()
        return
    rows, embedding.weight.data = embedding.weight.data, torch.empty(0)
    head.float()
    embedding.weight.data = rows
    keep_in_bf16(embedding)
