"""One function for every published draft head: `load_draft_head(folder, target, ...)`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from cluster.draft.heads import eagle3, medusa
from cluster.draft.heads.checkpoint import TargetShape, TargetWeight, read_config, refused
from cluster.draft.inside import Host
from cluster.engine.cpu.packed_linear import choose_kernels, pack_linears

Head = TypeVar("Head", bound=nn.Module)
DraftHead = eagle3.Eagle3Head | medusa.MedusaHead

# Architectures and keys of heads that we know by name and do not serve.
_REFUSED = {
    "dflash": "a DFlash block drafter",
    "dspark": "a DSpark block drafter",
    "domino": "a Domino block drafter",
    "jetspec": "a JetSpec block drafter",
}


def format_of(folder: Path, config: Mapping[str, Any]) -> str:
    """What a folder is: eagle3 or medusa; raises ConfigError for anything else, by its name."""
    architectures = " ".join(map(str, config.get("architectures") or ()))
    said = f"{architectures} {config.get('speculators_model_type', '')}".lower()
    for word, name in _REFUSED.items():
        if word in said or f"{word}_config" in config:
            raise refused(folder, f"it is {name}, which is not served")
    if "candidate_selector" in config or "selector_rank" in config:
        raise refused(folder, "it is a DFlash-2 block drafter, which is not served")
    if "eagle3" in said or "peagle" in said:
        return "eagle3"
    if "eagle" in said:
        raise refused(
            folder, "it is an EAGLE head of the first or second kind, which is not served"
        )
    if config.get("speculators_model_type") == "mtp" or "mtp_num_hidden_layers" in config:
        raise refused(
            folder, "it is a layer for multi-token prediction, which is not served; draft with an "
            "EAGLE-3 or Medusa head of the same target",
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
        f"it is no draft head that we know (architectures: {architectures or 'none'}); EAGLE-3 "
        "and Medusa folders are",
    )


def target_shape(host: Host) -> TargetShape:
    """What a head in this target must fit."""
    return TargetShape(host.hidden_size, host.vocab_size, host.num_layers, host.name)


def made_ready(head: Head, host: Host) -> Head:
    """The head on the target's device, in the numbers that it computes in there.

    On a CPU that is float32, which is nowhere emulated; its weights are packed as the target's are,
    by our kernels where they can be, and so take no more memory than in their file."""
    if host.device.type != "cpu":
        return head.to(host.device, host.dtype)
    head = head.float()
    pack_linears(head, choose_kernels(head))
    return head


def load_draft_head(folder: Path, target: TargetShape, weight: TargetWeight) -> DraftHead:
    """The draft head of a folder, checked against the target.

    weight: asked for what a folder leaves out.  Raises ConfigError that names the folder and what
    does not fit: a size, a vocabulary, a tensor missing or left over, another target that it was
    made for.
    """
    config = read_config(folder)
    if format_of(folder, config) == "eagle3":
        return eagle3.load(folder, config, target, weight)
    return medusa.load(folder, config, target, weight)
