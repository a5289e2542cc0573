"""One function for every published draft head: `load_draft_head(folder, target, ...)`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cluster.draft.heads import eagle3, medusa
from cluster.draft.heads.checkpoint import TargetShape, read_config, refused

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
    if "medusa_num_heads" in config or "medusa" in said or config.get("model_type") == "medusa":
        return "medusa"
    raise refused(
        folder,
        f"it is no draft head that we know (architectures: {architectures or 'none'}); EAGLE-3 "
        "and Medusa folders are",
    )


def load_draft_head(
    folder: Path, target: TargetShape, embedding: torch.Tensor, output_layer: torch.Tensor
) -> DraftHead:
    """The draft head of a folder, checked against the target.

    embedding, output_layer: [vocab, hidden], the target's own, for what a folder leaves out.
    Raises ConfigError that names the folder and what does not fit: a size, a vocabulary, a tensor
    missing or left over, another target that it was made for.
    """
    config = read_config(folder)
    if format_of(folder, config) == "eagle3":
        return eagle3.load(folder, config, target, embedding)
    return medusa.load(folder, config, target, output_layer)
