"""DFlash, DFlash-2 and DSpark: a few layers that fill in a block of tokens at once (Chen et al.
2026).

The block's first row is the last known token, all others are a mask token.  In every layer they
attend to the target's hidden rows of the text, fused and multiplied by that layer's key and value
weights, and to each other.  A row's output says which token stands in its place (DFlash) or behind
it (DSpark).  The context's keys and values depend on one position each: they can be kept.

A block's rows are computed at once and know nothing of each other's drafts.  DSpark's Markov head
makes up for that: it adds to a row's logits what the token drafted before it makes likely.  So does
DFlash-2's selector (`cluster.draft.heads.block_parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from cluster.draft.heads.block_parts import (
    MARKOV_KINDS,
    CandidateSelector,
    ConfidenceHead,
    ConvolvedLayer,
    MarkovHead,
    MarkovSpec,
    SecondSpec,
)
from cluster.draft.heads.checkpoint import HeadConfig, HeadTarget, read_tensors
from cluster.draft.heads.head import Head, HeadSpec, KeysValues, Sight, keys_values, planned
from cluster.engine.attention.seam import LayerPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec(HeadSpec):
    """sights: of each layer.
    predicts_next: a row drafts the token behind it; else the one in its place, the first row none.
    markov, has_confidence, confidence_sees_token: DSpark's heads, as far as it has them.
    second: of DFlash-2.  embedding_scale, output_scale, softcap: of embeddings and logits.
    """

    sights: tuple[Sight, ...]
    block_size: int
    predicts_next: bool
    markov: MarkovSpec | None = None
    has_confidence: bool = False
    confidence_sees_token: bool = False
    second: SecondSpec | None = None
    embedding_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float = 0.0

    @property
    def num_drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size if self.predicts_next else self.block_size - 1


class BlockHead(Head):
    """The target's rows are shown to every layer as keys and values; a block's own rows take
    embeddings alone."""

    spec: BlockSpec
    takes_before = False

    def __init__(self, spec: BlockSpec, embedding: torch.Tensor, output: torch.Tensor) -> None:
        config = planned(spec.layers)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        layers = (
            ConvolvedLayer(config, index, spec.block_size, spec.second)
            if spec.second
            else Qwen3DecoderLayer(config, index)
            for index in range(len(spec.sights))
        )
        rotary, norm = Qwen3RotaryEmbedding(config), Qwen3RMSNorm(hidden, eps)
        super().__init__(spec, embedding, output, layers, rotary, norm)
        self.fc = nn.Linear(len(spec.taps) * spec.target_hidden_size, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps)
        self.markov_head = (
            MarkovHead(spec.markov, hidden, len(embedding), spec.draft_vocab_size)
            if spec.markov
            else None
        )
        rank = spec.markov.rank if spec.markov and spec.confidence_sees_token else 0
        self.confidence_head = ConfidenceHead(hidden, rank) if spec.has_confidence else None
        self.candidate_selector = (
            CandidateSelector(hidden, len(embedding), spec.second) if spec.second else None
        )

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        return self.hidden_norm(self.fc(taps))

    def entered(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """See `Head`."""
        found: torch.Tensor = self.embed_tokens(token_ids)
        return found * self.spec.embedding_scale

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of rows that `block` returned: [..., hidden] -> float32[..., draft_vocab]."""
        found: torch.Tensor = self.lm_head(hidden).float() * self.spec.output_scale
        softcap = self.spec.softcap
        return torch.tanh(found / softcap) * softcap if softcap else found

    def keys_values(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        plan: LayerPlan,
    ) -> list[KeysValues]:
        """See `Head`: each depends on its own fused row alone."""
        rotation = self.rotary(hidden, positions[None])
        return [keys_values(layer.self_attn, hidden[None], rotation) for layer in self.layers]

    def block(self, *given: Any) -> torch.Tensor:
        """See `Head`."""
        return super().block(*given)[:, -self.spec.num_drafts :]

    @property
    def sights(self) -> Sequence[Sight]:
        """See `Head`."""
        return self.spec.sights


# Reads folders of block drafters: DFlash's and DSpark's, in their authors' form and speculators'.
#
# The forms name what they tap differently: the authors the layer whose output they take, which is
# tap id + 1; `speculators` taps as they stand.


# What a configuration says of the layers; rope_* in any of transformers' forms.
_OF_THE_LAYERS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)


def layers_of(config: HeadConfig) -> Qwen3Config:
    """Sizes, norms and rotary embedding of a drafter's layers, in either form."""
    own = config.layers
    return Qwen3Config(**{key: own[key] for key in _OF_THE_LAYERS if key in own})


def read_spec(config: HeadConfig, target: HeadTarget) -> BlockSpec:
    """The configuration of a drafter in either form; raises ConfigError where it does not fit."""
    said, layers = config.said, layers_of(config)
    target_hidden_size, draft_vocab_size = config.sizes(layers, target)
    spec = BlockSpec(
        layers=layers,
        sights=_sights(config, layers.num_hidden_layers),
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        taps=config.taps(_taps(config, layers.num_hidden_layers, target), target),
        block_size=_number(config, "block_size"),
        mask_token_id=_number(config, "mask_token_id"),
        predicts_next=_predicts_next(config),
        markov=_markov(config),
        has_confidence=bool(said("enable_confidence_head")),
        confidence_sees_token=bool(said("confidence_head_with_markov")),
        second=_second(config, layers.hidden_size),
        embedding_scale=float(said("input_embedding_scale", default=1.0)),
        output_scale=float(said("output_multiplier", default=1.0)),
        softcap=float(said("final_logit_softcapping", default=0.0)),
    )
    if spec.num_drafts < 1:
        raise config.refused(f"its block_size is {spec.block_size}, which drafts nothing")
    if not 0 <= spec.mask_token_id < target.vocab_size:
        raise config.refused(
            f"its mask_token_id is {spec.mask_token_id}, the embedding has {target.vocab_size} rows"
        )
    if spec.has_confidence and spec.confidence_sees_token and spec.markov is None:
        raise config.refused("its confidence_head_with_markov needs a markov_rank above 0")
    if said("is_neox_style") is False:
        raise config.refused("its rotary embedding is interleaved, which is not served")
    named = said("num_target_layers", default=target.num_layers)
    config.size("num_target_layers", named, target.num_layers)
    return spec


def default_taps(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The taps of authors' folders that name none: evenly spread outputs of the target's layers."""
    if num_layers == 1:
        return (num_target_layers // 2 + 1,)
    first, last = 1, num_target_layers - 3
    step = (last - first) / (num_layers - 1)
    return tuple(round(first + i * step) + 1 for i in range(num_layers))


def _number(config: HeadConfig, key: str) -> int:
    value = config.said(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise config.refused(f"config.json says {key} {value!r}; it must be a number")
    return value


def _taps(config: HeadConfig, num_layers: int, target: HeadTarget) -> Sequence[int]:
    if counted := config.said("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        return [int(tap) for tap in counted]
    if layers := config.said("target_layer_ids"):
        return [int(layer) + 1 for layer in layers]
    if config.is_speculators:
        raise config.refused("config.json names no aux_hidden_state_layer_ids")
    return default_taps(target.num_layers, num_layers)


def _predicts_next(config: HeadConfig) -> bool:
    """True if a row drafts the token behind it; folders say so in several ways, or not at all."""
    said = config.said("sample_from_anchor", "shift_label")
    if said is not None:
        return bool(said)
    if config.is_speculators:  # a block of which all rows draft is as long as its drafts
        return bool(config.proposed == config.said("block_size"))
    return "dspark" in config.words or config.said("projector_type") == "dspark"


def _sights(config: HeadConfig, num_layers: int) -> tuple[Sight, ...]:
    said, layers = config.said, config.layers
    kinds = layers.get("layer_types") or said("layer_types") or ()
    is_sliding = [kind == "sliding_attention" for kind in kinds] or [False] * num_layers
    # Rows of layers with a window do not look ahead, unless the folder says otherwise.
    causal = [each and not said("sliding_window_non_causal") for each in is_sliding]
    if said("use_swa") and not any(is_sliding):
        is_sliding = [True] * num_layers
    is_causal = said("is_causal", "causal")
    if is_causal is not None:
        causal = [bool(is_causal)] * num_layers
    window = said("swa_window_size") or layers.get("sliding_window")
    if any(is_sliding) and not window:
        raise config.refused("its layers have a sliding window of no stated size")
    if len(is_sliding) != num_layers:
        raise config.refused(f"it has {num_layers} layers, and layer_types of {len(is_sliding)}")
    return tuple(
        Sight(int(window or 0) if slides else None, looks_back)
        for slides, looks_back in zip(is_sliding, causal, strict=True)
    )


def _second(config: HeadConfig, hidden_size: int) -> SecondSpec | None:
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    if "dflash2" not in config.words and config.said(*keys) is None:
        return None
    spec = SecondSpec(*(_number(config, key) for key in keys))
    if hidden_size % spec.group_size:
        size = f"its hidden size {hidden_size} is no multiple of its conv_group_size"
        raise config.refused(f"{size} {spec.group_size}")
    return spec


def _markov(config: HeadConfig) -> MarkovSpec | None:
    rank = int(config.said("markov_rank", default=0))
    kind = str(config.said("markov_head_type", default="vanilla")).lower()
    if rank and kind not in MARKOV_KINDS:
        raise config.refused(f"its markov_head_type is {kind!r}; known: {', '.join(MARKOV_KINDS)}")
    return MarkovSpec(kind, rank) if rank else None


def load(config: HeadConfig, target: HeadTarget) -> BlockHead:
    """The drafter of a folder; it may leave out the embedding and the output layer."""
    tensors = read_tensors(config.folder, lambda name: name.removeprefix("model."), target)
    spec = read_spec(config, target)
    return BlockHead.filled(spec, tensors)
