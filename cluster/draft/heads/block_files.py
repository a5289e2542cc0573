"""Reads folders of block drafters: DFlash's and DSpark's, in their authors' form and speculators'.

The forms name what they tap differently: the authors the layer whose output they take, which is tap
id + 1; `speculators` taps as they stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Qwen3Config

from cluster.draft.heads.block import MARKOV_KINDS, BlockHead, BlockSpec, MarkovSpec, Sight
from cluster.draft.heads.checkpoint import (
    TargetShape,
    TargetWeight,
    TensorReader,
    check_size,
    check_taps,
    layer_part,
    read_tensors,
    refused,
)
from cluster.draft.heads.eagle3 import token_map

# What a configuration says of the layers; rope_* in any of transformers' forms.
_OF_THE_LAYERS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias",
    "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
_SLIDING = "sliding_attention"


class _Config:
    """A folder's configuration, whose keys stand at the top, in `dflash_config` or in
    `transformer_layer_config`."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self.is_speculators = "speculators_model_type" in config
        self.layers = layer_part(folder, config)
        # DSpark's keys are in its own table in some folders.
        self._tables = (
            config,
            config.get("dflash_config") or {},
            config.get("dspark_config") or {},
        )
        methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        self.speculative_tokens = methods[0].get("speculative_tokens")
        named = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
        self.is_dspark = "dspark" in named or self.said("projector_type") == "dspark"

    def layer_config(self) -> Qwen3Config:
        own = {key: self.layers[key] for key in _OF_THE_LAYERS if key in self.layers}
        return Qwen3Config(**own)

    def said(self, key: str, default: Any = None) -> Any:
        for table in self._tables:
            if table.get(key) is not None:
                return table[key]
        return default

    def number(self, key: str) -> int:
        value = self.said(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise refused(self.folder, f"config.json says {key} {value!r}; it must be a number")
        return value


def layers_of(folder: Path, config: Mapping[str, Any]) -> Qwen3Config:
    """Sizes, norms and rotary embedding of a drafter's layers, in either form."""
    return _Config(folder, config).layer_config()


def read_spec(folder: Path, config: Mapping[str, Any], target: TargetShape) -> BlockSpec:
    """The configuration of a drafter in either form; raises ConfigError where it does not fit."""
    read = _Config(folder, config)
    layers = read.layer_config()
    vocab_size = int(read.layers.get("vocab_size", target.vocab_size))
    spec = BlockSpec(
        layers=layers,
        sights=_sights(read, layers.num_hidden_layers),
        target_hidden_size=int(read.said("target_hidden_size") or layers.hidden_size),
        draft_vocab_size=int(read.said("draft_vocab_size") or vocab_size),
        taps=_taps(read, layers.num_hidden_layers, target),
        block_size=read.number("block_size"),
        mask_token_id=read.number("mask_token_id"),
        predicts_next=_predicts_next(read),
        markov=_markov(read),
        has_confidence=bool(read.said("enable_confidence_head", False)),
        confidence_sees_token=bool(read.said("confidence_head_with_markov", False)),
    )
    if spec.num_drafts < 1:
        raise refused(folder, f"its block_size is {spec.block_size}, which drafts nothing")
    if spec.has_confidence and spec.confidence_sees_token and spec.markov is None:
        raise refused(folder, "its confidence_head_with_markov needs a markov_rank above 0")
    if read.said("is_neox_style") is False:
        raise refused(folder, "its rotary embedding is interleaved, which is not served")
    check_size(folder, "target_hidden_size", spec.target_hidden_size, target.hidden_size)
    check_size(folder, "vocab_size", vocab_size, target.vocab_size)
    named = read.said("num_target_layers")
    if named is not None:
        check_size(folder, "num_target_layers", int(named), target.num_layers)
    check_taps(folder, spec.taps, target.num_layers)
    return spec


def default_taps(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The taps of authors' folders that name none: evenly spread outputs of the target's layers."""
    if num_layers == 1:
        return (num_target_layers // 2 + 1,)
    first, last = 1, num_target_layers - 3
    step = (last - first) / (num_layers - 1)
    return tuple(round(first + i * step) + 1 for i in range(num_layers))


def _taps(read: _Config, num_layers: int, target: TargetShape) -> tuple[int, ...]:
    counted = read.said("aux_hidden_state_layer_ids") or read.said(
        "eagle_aux_hidden_state_layer_ids"
    )
    if counted:
        return tuple(int(tap) for tap in counted)
    layers = read.said("target_layer_ids")
    if layers:
        return tuple(int(layer) + 1 for layer in layers)
    if read.is_speculators:
        raise refused(read.folder, "config.json names no aux_hidden_state_layer_ids")
    return default_taps(target.num_layers, num_layers)


def _predicts_next(read: _Config) -> bool:
    """True if a row drafts the token behind it; folders say so in several ways, or not at all."""
    for key in ("sample_from_anchor", "shift_label"):
        if read.said(key) is not None:
            return bool(read.said(key))
    if read.is_speculators:  # a block of which all rows draft is as long as its drafts
        return bool(read.speculative_tokens == read.said("block_size"))
    return read.is_dspark


def _sights(read: _Config, num_layers: int) -> tuple[Sight, ...]:
    kinds = read.layers.get("layer_types") or read.said("layer_types")
    is_sliding = [kind == _SLIDING for kind in kinds or ()] or [False] * num_layers
    # Rows of layers with a window do not look ahead, unless the folder says otherwise.
    causal = [each and not read.said("sliding_window_non_causal", False) for each in is_sliding]
    if read.said("use_swa", False) and not any(is_sliding):
        is_sliding = [True] * num_layers
    said = read.said("is_causal", read.said("causal"))
    if said is not None:
        causal = [bool(said)] * num_layers
    window = read.said("swa_window_size") or read.layers.get("sliding_window")
    if any(is_sliding) and not window:
        raise refused(read.folder, "its layers have a sliding window of no stated size")
    if len(is_sliding) != num_layers:
        raise refused(
            read.folder, f"it has {num_layers} layers, and layer_types of {len(is_sliding)}"
        )
    return tuple(
        Sight(int(window or 0) if slides else None, looks_back)
        for slides, looks_back in zip(is_sliding, causal, strict=True)
    )


def _markov(read: _Config) -> MarkovSpec | None:
    rank = int(read.said("markov_rank", 0))
    kind = str(read.said("markov_head_type", "vanilla")).lower()
    if rank and kind not in MARKOV_KINDS:
        raise refused(
            read.folder, f"its markov_head_type is {kind!r}; known: {', '.join(MARKOV_KINDS)}"
        )
    return MarkovSpec(kind, rank) if rank else None


def load(
    folder: Path, config: Mapping[str, Any], target: TargetShape, weight: TargetWeight,
    read: TensorReader = read_tensors,
) -> BlockHead:  # fmt: skip
    """The drafter of a folder.  weight: the target's, for the embedding and the output layer that a
    folder leaves out."""
    tensors = read(folder, _plain_name)
    if any(name.startswith("candidate_selector.") for name in tensors.held):
        raise refused(folder, "it is a DFlash-2 block drafter, which is not served")
    spec = read_spec(folder, config, target)
    hidden = spec.layers.hidden_size
    ids = token_map(folder, tensors, spec.draft_vocab_size, target)
    shape = (target.vocab_size, hidden)
    embedding = tensors.take_or_share("embed_tokens.weight", shape, weight, "embedding")
    output = tensors.take_if_there("lm_head.weight", (spec.draft_vocab_size, hidden))
    if output is None:
        output = tensors.take_or_share("lm_head.weight", shape, weight, "output")[ids]
    if not 0 <= spec.mask_token_id < len(embedding):
        raise refused(
            folder,
            f"its mask_token_id is {spec.mask_token_id}, the embedding has {len(embedding)} rows",
        )
    with tensors.device:
        head = BlockHead(spec, embedding, output)
    tensors.fill(head, {"token_map": ids}, kept=("embed_tokens.weight", "lm_head.weight"))
    return head.eval()


def _plain_name(name: str) -> str:
    """A tensor's name as the module has it."""
    return name.removeprefix("model.")
