"""EAGLE-3: one decoder layer that drafts from the target's hidden rows (Li et al. 2025); P-EAGLE,
one to a few that draft a whole chain in one pass (Hui et al. 2026).

Reads the authors' folders (also SpecForge's and AngelSlim's) and those of `speculators`.  A head's
row at position t takes the embedding of token t + 1 and the target's hidden row of position t; for
drafted tokens its own last output stands in for that row.

The first row of a P-EAGLE's round is that of EAGLE-3: the text's last token and the target's hidden
row before it.  Every other row takes a mask token and `mask_hidden`, a learnt row in place of the
target's taps, and stands one position further on; it sees the text and the rows before it.  Row i
says what token follows i tokens behind the text.  Layers after the first are ordinary ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from cluster.draft.heads.checkpoint import HeadConfig, HeadTarget, read_tensors
from cluster.draft.heads.head import Head, HeadSpec, planned

# Tokens of a pass where the folder does not say: what vLLM's release of the format measured best.
DEFAULT_DRAFTS = 7
# What the trainers call the mask token, in the order in which vLLM looks for it.
_MASK_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")
# Those that no other head has.
_MARKS = ("parallel_drafting", "pard_token", "ptd_token_id")
# Keys of the authors' flat config that would confuse a Llama configuration.
_NOT_OF_THE_LAYER = frozenset(
    ("architectures", "model_type", "draft_vocab_size", "eagle_config", "layer_types", "made_for")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec(HeadSpec):
    """norm_before_residual: the residual path carries the normalised row.  has_tap_norms: each tap
    is normalised before they are fused.  norms_all_taps: the taps, side by side, are.
    num_drafts: of P-EAGLE, tokens that it was trained to draft at once; 0 = it is EAGLE-3."""

    norm_before_residual: bool = False
    has_tap_norms: bool = False
    norms_all_taps: bool = False
    num_drafts: int = 0


class FirstLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """Its rows are twice as wide as a Llama's: the token's embedding beside the hidden row."""

    def __init__(self, layer: LlamaConfig, *, norm_before_residual: bool) -> None:
        super().__init__(layer, layer_idx=0)
        hidden = layer.hidden_size
        self._norm_before_residual = norm_before_residual
        self.hidden_norm = LlamaRMSNorm(hidden, layer.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(self.self_attn, name).out_features
            wide = nn.Linear(2 * hidden, size, bias=bool(layer.attention_bias))
            setattr(self.self_attn, name, wide)

    def side_by_side(self, rows: torch.Tensor) -> torch.Tensor:
        """What it attends with, normalised.  rows: [..., 2 * hidden]."""
        embedded, hidden = rows.chunk(2, dim=-1)
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)

    def forward(self, rows: torch.Tensor, **given: Any) -> torch.Tensor:
        """As a Llama's decoder layer: [1, rows, 2 * hidden] -> [1, rows, hidden]."""
        both = self.side_by_side(rows)
        residual = (both if self._norm_before_residual else rows).chunk(2, dim=-1)[1]
        hidden = residual + self.self_attn(both, **given)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(Head):
    """mask_hidden: [taps * target hidden], where it drafts several tokens in a pass."""

    spec: Eagle3Spec
    shares_output = False
    mask_hidden: torch.Tensor

    def __init__(self, spec: Eagle3Spec, embedding: torch.Tensor) -> None:
        layer = planned(spec.layers)
        hidden, eps = layer.hidden_size, layer.rms_norm_eps
        first = FirstLayer(layer, norm_before_residual=spec.norm_before_residual)
        deeper = (LlamaDecoderLayer(layer, i) for i in range(1, layer.num_hidden_layers))
        rotary, norm = LlamaRotaryEmbedding(layer), LlamaRMSNorm(hidden, eps)
        super().__init__(spec, embedding, None, [first, *deeper], rotary, norm)
        num_taps, size = len(spec.taps), spec.target_hidden_size
        self.fc = nn.Linear(num_taps * size, hidden, bias=False)
        self.fc_norm = nn.ModuleList(
            LlamaRMSNorm(size, eps) for _ in range(num_taps if spec.has_tap_norms else 0)
        )
        self.input_norm = LlamaRMSNorm(num_taps * size, eps) if spec.norms_all_taps else None
        if spec.num_drafts:
            self.register_buffer("mask_hidden", torch.zeros(num_taps * size))
        self._mask_row: torch.Tensor | None = None  # the same in every pass

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if len(self.fc_norm):
            parts = torch.split(taps, self.spec.target_hidden_size, dim=-1)
            taps = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        return self.fc(taps)

    def entered(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """See `Head`."""
        return torch.cat([self.embed_tokens(token_ids), hidden], dim=-1)

    def _masked(self, hidden: torch.Tensor, size: int) -> torch.Tensor:
        if self._mask_row is None:
            self._mask_row = self.fuse(self.mask_hidden.to(hidden.dtype)[None])
        rows = self._mask_row.repeat(len(hidden), size, 1)
        rows[:, 0] = hidden
        return rows


def is_parallel(config: HeadConfig) -> bool:
    """True if an EAGLE-3 folder's configuration is that of a P-EAGLE head."""
    return "peagle" in config.words or any(config.data.get(key) for key in _MARKS)


def layers_of(config: HeadConfig) -> LlamaConfig:
    """Sizes, norms and rotary embedding of a head's layers, in either form of configuration."""
    own = config.layers
    layer = LlamaConfig(**{k: v for k, v in own.items() if k not in _NOT_OF_THE_LAYER})
    layer.num_hidden_layers = int(own.get("num_hidden_layers", 1)) if is_parallel(config) else 1
    return layer


def read_spec(config: HeadConfig, target: HeadTarget) -> Eagle3Spec:
    """The configuration of a head in either form; raises ConfigError where it does not fit."""
    said, layers = config.said, layers_of(config)
    eagle = config.data.get("eagle_config", {})
    if not isinstance(eagle, dict):
        raise config.refused(f"eagle_config is {eagle!r}; it must be a mapping, or be left out")
    if said("use_aux_hidden_state") is False:
        raise config.refused(
            "use_aux_hidden_state is false: a head that reads the target's last layer alone is not "
            "served"
        )
    if said("kv_lora_rank"):
        raise config.refused(
            "its layer has multi-head latent attention (MLA), which is not served; draft with an "
            "EAGLE-3 head of Llama's layer"
        )
    if "sliding_attention" in (config.layers.get("layer_types") or ()):
        raise config.refused("its layers attend in a sliding window, which is not served")
    target_hidden_size, draft_vocab_size = config.sizes(layers, target)
    taps = said("eagle_aux_hidden_state_layer_ids", default=default_taps(target.num_layers))
    return Eagle3Spec(
        layers=layers,
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        taps=config.taps(taps, target),
        # Absent means False, for the authors' folders and for `speculators`.
        norm_before_residual=bool(said("norm_before_residual")),
        has_tap_norms=bool(said("fc_norm")),
        norms_all_taps=bool(said("norm_before_fc")),
        norms_output=bool(said("norm_output")),
        mask_token_id=_mask_token_of(config, target.vocab_size) if is_parallel(config) else -1,
        num_drafts=int(config.proposed or DEFAULT_DRAFTS) if is_parallel(config) else 0,
    )


def load(config: HeadConfig, target: HeadTarget) -> Eagle3Head:
    """The head of a folder, of which the target's embedding stands in for a missing one."""
    spec = read_spec(config, target)
    tensors = read_tensors(config.folder, _name_of, target)
    if spec.num_drafts and (mask := tensors.held.get("mask_hidden")) is not None:
        # Written with one or two leading dimensions of one, by what trained it.
        tensors.held["mask_hidden"] = mask.flatten()
    for index in range(1, spec.layers.num_hidden_layers):
        # Some writers give every layer the first one's norms, of which these have no use for one.
        tensors.held.pop(f"layers.{index}.hidden_norm.weight", None)
    return Eagle3Head.filled(spec, tensors)


def _name_of(stored: str) -> str:
    return stored.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The taps of folders that name none: the inputs of layers 2, n // 2 and n - 3."""
    return (2, num_layers // 2, num_layers - 3)


def _mask_token_of(config: HeadConfig, vocab_size: int) -> int:
    found = config.said(*_MASK_KEYS)
    if found is None:
        raise config.refused(
            f"its configuration names no mask token ({', '.join(_MASK_KEYS)}), which a P-EAGLE "
            "head drafts with"
        )
    if not 0 <= int(found) < vocab_size:
        raise config.refused(f"its mask token {found} is none of the target's {vocab_size}")
    return int(found)
