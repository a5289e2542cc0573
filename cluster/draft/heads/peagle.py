"""P-EAGLE: an EAGLE-3 head of one to a few layers that drafts a whole chain in one pass.

Hui et al., "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training", 2026.  The first row of a
round is that of EAGLE-3: the text's last token and the target's hidden row before it.  Every other
row takes a mask token and `mask_hidden`, a learnt row in place of the target's taps, and stands one
position further on; it sees the text and the rows before it.  Row i says what token follows i
tokens behind the text.  Layers after the first are ordinary ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from cluster.draft.heads import eagle3
from cluster.draft.heads.checkpoint import (
    TargetShape,
    TargetWeight,
    TensorReader,
    layer_part,
    read_tensors,
    refused,
)
from cluster.draft.heads.layers import KeysValues, Noting, keys_values, planned
from cluster.engine.attention.seam import LayerPlan

# Tokens of a pass where the folder does not say: what vLLM's release of the format measured best.
DEFAULT_DRAFTS = 7
# What the trainers call the mask token, in the order in which vLLM looks for it.
_MASK_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")
# Those that no other head has.
_MARKS = ("parallel_drafting", "pard_token", "ptd_token_id")


class ParallelHead(eagle3.Eagle3Head):
    """The head's weights and its pass.

    mask_hidden: [taps * target hidden].  num_drafts: tokens that it was trained to draft at once.
    """

    mask_hidden: torch.Tensor

    def __init__(
        self,
        spec: eagle3.Eagle3Spec,
        embedding: torch.Tensor,
        num_layers: int,
        mask_token_id: int,
        num_drafts: int,
    ) -> None:
        super().__init__(spec, embedding)
        self.num_layers = num_layers
        self.mask_token_id = mask_token_id
        self.num_drafts = num_drafts
        self._mask_row: torch.Tensor | None = None  # the same in every pass
        layer = planned(spec.layer)
        self.deeper = nn.ModuleList(LlamaDecoderLayer(layer, i) for i in range(1, num_layers))
        self.register_buffer("mask_hidden", torch.zeros(len(spec.taps) * spec.target_hidden_size))

    def draft(
        self,
        last_token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        num_drafts: int,
        plan: LayerPlan,
    ) -> torch.Tensor:
        """One pass behind each of several texts: [texts, num_drafts, hidden], for `logits`.

        last_token_ids: int64[texts].  hidden: [texts, hidden], the fused taps before them.
        positions: int64[texts], of the first rows, for the rotary embedding.
        """
        if self._mask_row is None:
            self._mask_row = self.fuse(self.mask_hidden.to(hidden.dtype)[None])
        num_texts = len(last_token_ids)
        ids = last_token_ids.new_full((num_texts, num_drafts), self.mask_token_id)
        ids[:, 0] = last_token_ids
        rows = self._mask_row.repeat(num_texts, num_drafts, 1)
        rows[:, 0] = hidden
        places = positions[:, None] + torch.arange(num_drafts, device=positions.device)
        found = super().forward(ids.flatten(), rows.flatten(0, 1), places.flatten(), plan)
        rotation = self.rotary(found, places.flatten()[None])
        for layer in self.deeper:
            found = layer(found[None], position_embeddings=rotation, plan=plan)[0]
        return found.view(num_texts, num_drafts, -1)

    def keys_values(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor,
        plan: LayerPlan,
    ) -> list[KeysValues]:  # fmt: skip
        """See `Eagle3Head.keys_values`."""
        if not len(self.deeper):
            return super().keys_values(token_ids, hidden, positions, plan)
        noting = Noting(plan)
        hidden = super().forward(token_ids, hidden, positions, noting)
        rotation = self.rotary(hidden, positions[None])
        *above, last = self.deeper
        for layer in above:
            hidden = layer(hidden[None], position_embeddings=rotation, plan=noting)[0]
        assert isinstance(last, LlamaDecoderLayer)
        return [*noting.noted, keys_values(last.self_attn, last.input_layernorm(hidden), rotation)]


def is_parallel(config: Mapping[str, Any]) -> bool:
    """True if an EAGLE-3 folder's configuration is that of a P-EAGLE head."""
    said = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
    return "peagle" in said or any(config.get(key) for key in _MARKS)


def num_layers_of(folder: Path, config: Mapping[str, Any]) -> int:
    """How many layers a P-EAGLE head has."""
    return int(layer_part(folder, config).get("num_hidden_layers", 1))


def load(
    folder: Path, config: Mapping[str, Any], target: TargetShape, weight: TargetWeight,
    read: TensorReader = read_tensors,
) -> ParallelHead:  # fmt: skip
    """The head of a folder; see `eagle3.load`."""
    tensors = read(folder, _plain_name)
    spec = eagle3.read_spec(folder, config, target)
    num_layers = num_layers_of(folder, config)
    mask_token_id = _mask_token_of(folder, config, target)
    if (mask := tensors.held.get("mask_hidden")) is not None:
        # Written with one or two leading dimensions of one, by what trained it.
        tensors.held["mask_hidden"] = mask.flatten()
    for index in range(num_layers - 1):
        # Some writers give every layer the first one's norms, of which these have no use for one.
        tensors.held.pop(f"deeper.{index}.hidden_norm.weight", None)

    def empty(embedding: torch.Tensor) -> ParallelHead:
        return ParallelHead(spec, embedding, num_layers, mask_token_id, _num_drafts_of(config))

    return eagle3.filled(folder, tensors, spec, target, weight, empty)


def _mask_token_of(folder: Path, config: Mapping[str, Any], target: TargetShape) -> int:
    found = next((config[key] for key in _MASK_KEYS if config.get(key) is not None), None)
    if found is None:
        raise refused(
            folder, f"its configuration names no mask token ({', '.join(_MASK_KEYS)}), which a "
            "P-EAGLE head drafts with",
        )  # fmt: skip
    if not 0 <= int(found) < target.vocab_size:
        raise refused(folder, f"its mask token {found} is none of the target's {target.vocab_size}")
    return int(found)


def _num_drafts_of(config: Mapping[str, Any]) -> int:
    """The number of tokens that the folder proposes by its default method."""
    said = config.get("speculators_config") or {}
    methods = said.get("proposal_methods") or []
    default = said.get("default_proposal_method")
    chosen = [each for each in methods if each.get("proposal_type") == default] or methods
    return int(chosen[0].get("speculative_tokens") or DEFAULT_DRAFTS) if chosen else DEFAULT_DRAFTS


def _plain_name(name: str) -> str:
    """A tensor's name in either form as the module has it."""
    found = re.match(r"layers\.([1-9]\d*)\.(.*)", name)
    if found is None:
        return eagle3.plain_name(name)
    return f"deeper.{int(found[1]) - 1}.{found[2]}"
