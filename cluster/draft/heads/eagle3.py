"""EAGLE-3: one decoder layer that drafts from the target's hidden rows (Li et al. 2025).

Reads the authors' folders (also SpecForge's and AngelSlim's) and those of `speculators`.  A head's
row at position t takes the embedding of token t + 1 and the target's hidden row of position t; for
drafted tokens its own last output stands in for that row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from cluster.draft.heads.checkpoint import (
    TargetShape,
    TargetWeight,
    TensorReader,
    Tensors,
    check_size,
    check_taps,
    layer_part,
    read_tensors,
    refused,
)
from cluster.draft.heads.layers import HeadModule, KeysValues, keys_values, planned
from cluster.engine.attention.seam import LayerPlan


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """A folder's description of its head.

    layer: sizes, norms and rotary embedding of the decoder layer, as a Llama configuration.
    taps: the hidden rows it takes; tap i is transformers' hidden_states[i], the input of layer i.
    norm_before_residual: the residual path carries the normalised row.  has_tap_norms: each tap is
    normalised before they are fused.  norms_all_taps: the taps, side by side, are.
    norms_output: the row handed on to the next draft is normalised.
    """

    layer: LlamaConfig
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    norm_before_residual: bool = False
    has_tap_norms: bool = False
    norms_all_taps: bool = False
    norms_output: bool = False


class Eagle3Head(HeadModule):
    """The head's weights and its forward.

    embedding: [vocab, hidden], the target's own where the file has none.
    """

    num_layers = 1

    def __init__(self, spec: Eagle3Spec, embedding: torch.Tensor) -> None:
        super().__init__()
        self.spec = spec
        layer = spec.layer
        hidden, eps = layer.hidden_size, layer.rms_norm_eps
        num_taps = len(spec.taps)
        self.embed_tokens = nn.Embedding(len(embedding), hidden, _weight=embedding, _freeze=True)
        self.fc = nn.Linear(num_taps * spec.target_hidden_size, hidden, bias=False)
        self.fc_norm = nn.ModuleList(
            LlamaRMSNorm(spec.target_hidden_size, eps)
            for _ in range(num_taps if spec.has_tap_norms else 0)
        )
        self.input_norm = (
            LlamaRMSNorm(num_taps * spec.target_hidden_size, eps) if spec.norms_all_taps else None
        )
        self.input_layernorm = LlamaRMSNorm(hidden, eps)
        self.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps)
        self.self_attn = LlamaAttention(planned(layer), layer_idx=0)
        # Its rows are twice as wide as a Llama's: the token beside the hidden row.
        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(self.self_attn, name).out_features
            wide = nn.Linear(2 * hidden, size, bias=bool(layer.attention_bias))
            setattr(self.self_attn, name, wide)
        self.mlp = LlamaMLP(layer)
        self.rotary = LlamaRotaryEmbedding(layer)
        self.norm = LlamaRMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, spec.draft_vocab_size, bias=False)
        self.register_buffer("token_map", torch.arange(spec.draft_vocab_size))

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """The target's rows as the head takes them: [rows, taps * target hidden] -> [rows, hidden].

        taps: in the order of `spec.taps`.
        """
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if len(self.fc_norm):
            parts = torch.split(taps, self.spec.target_hidden_size, dim=-1)
            taps = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        fused: torch.Tensor = self.fc(taps)
        return fused

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        plan: LayerPlan,
    ) -> torch.Tensor:
        """One row each: int64[rows] and [rows, hidden] -> the rows' outputs, [rows, hidden].

        hidden: fused taps, or `handed_on` of the row before.  positions: int64[rows] for the rotary
        embedding.  plan: what the rows attend to.
        """
        normed = self.hidden_norm(hidden)
        residual = normed if self.spec.norm_before_residual else hidden
        both = self._side_by_side(token_ids, normed)
        rotation = self.rotary(both, positions[None])
        attended, _ = self.self_attn(both[None], position_embeddings=rotation, plan=plan)
        hidden = residual + attended[0]
        found: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return found

    def keys_values(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor,
        plan: LayerPlan,
    ) -> list[KeysValues]:  # fmt: skip
        """The keys and values that rows behind these attend to, of each layer.

        The arguments are those of `forward`.  plan: is asked for all layers but the last, whose
        rows are not computed."""
        both = self._side_by_side(token_ids, self.hidden_norm(hidden))
        return [keys_values(self.self_attn, both, self.rotary(both, positions[None]))]

    def _side_by_side(self, token_ids: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.input_layernorm(self.embed_tokens(token_ids)), normed], dim=-1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] as `forward` returned it -> [rows, draft_vocab]."""
        found: torch.Tensor = self.lm_head(self.norm(hidden))
        return found

    def handed_on(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows that the next drafted ones take in place of the target's."""
        found: torch.Tensor = self.norm(hidden) if self.spec.norms_output else hidden
        return found


Head = TypeVar("Head", bound=Eagle3Head)


def read_spec(folder: Path, config: Mapping[str, Any], target: TargetShape) -> Eagle3Spec:
    """The configuration of a head in either form; raises ConfigError where it does not fit."""
    own, layer = layer_part(folder, config), layer_of(folder, config)
    vocab_size = int(own.get("vocab_size", target.vocab_size))
    eagle = config.get("eagle_config", {})
    if not isinstance(eagle, dict):
        raise refused(folder, f"eagle_config is {eagle!r}; it must be a mapping, or be left out")
    said = {**config, **eagle}
    if said.get("use_aux_hidden_state") is False:
        raise refused(
            folder,
            "use_aux_hidden_state is false: a head that reads the target's last layer alone is not "
            "served",
        )
    taps = said.get(_TAP_KEY)
    spec = Eagle3Spec(
        layer=layer,
        target_hidden_size=int(config.get("target_hidden_size") or layer.hidden_size),
        draft_vocab_size=int(config.get("draft_vocab_size") or vocab_size),
        taps=default_taps(target.num_layers) if taps is None else tuple(map(int, taps)),
        # Absent means False, for the authors' folders and for `speculators`.
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        has_tap_norms=bool(config.get("fc_norm", False)),
        norms_all_taps=bool(config.get("norm_before_fc", False)),
        norms_output=bool(config.get("norm_output", False)),
    )
    check_size(folder, "target_hidden_size", spec.target_hidden_size, target.hidden_size)
    check_size(folder, "vocab_size", vocab_size, target.vocab_size)
    check_taps(folder, spec.taps, target.num_layers)
    if "sliding_attention" in (own.get("layer_types") or ()):
        raise refused(folder, "its layers attend in a sliding window, which is not served")
    return spec


def layer_of(folder: Path, config: Mapping[str, Any]) -> LlamaConfig:
    """Sizes, norms and rotary embedding of a head's layer, in either form of configuration."""
    own = layer_part(folder, config)
    layer = LlamaConfig(**{k: v for k, v in own.items() if k not in _NOT_OF_THE_LAYER})
    layer.num_hidden_layers = 1
    return layer


def load(
    folder: Path, config: Mapping[str, Any], target: TargetShape, weight: TargetWeight,
    read: TensorReader = read_tensors,
) -> Eagle3Head:  # fmt: skip
    """The head of a folder.  weight: the target's, whose embedding stands in for a missing one."""
    spec = read_spec(folder, config, target)
    tensors = read(folder, plain_name)
    return filled(
        folder, tensors, spec, target, weight, lambda embedding: Eagle3Head(spec, embedding)
    )


def filled(
    folder: Path, tensors: Tensors, spec: Eagle3Spec, target: TargetShape, weight: TargetWeight,
    empty: Callable[[torch.Tensor], Head],
) -> Head:  # fmt: skip
    """The head that `empty` makes around an embedding, with the tensors of its folder."""
    shape = (target.vocab_size, spec.layer.hidden_size)
    embedding = tensors.take_or_share("embed_tokens.weight", shape, weight, "embedding")
    ids = token_map(folder, tensors, spec.draft_vocab_size, target)
    with tensors.device:
        head = empty(embedding)
    tensors.fill(head, {"token_map": ids}, kept=("embed_tokens.weight",))
    return head.eval()


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The taps of folders that name none: the inputs of layers 2, n // 2 and n - 3."""
    return (2, num_layers // 2, num_layers - 3)


_TAP_KEY = "eagle_aux_hidden_state_layer_ids"
# Keys of the authors' flat config that would confuse a Llama configuration.
_NOT_OF_THE_LAYER = frozenset(
    (
        "architectures",
        "model_type",
        "draft_vocab_size",
        "eagle_config",
        "num_hidden_layers",
        "layer_types",
        "made_for",
    )
)


def plain_name(name: str) -> str:
    """A tensor's name in either form as the module has it."""
    for prefix in ("midlayer.", "layers.0."):
        name = name.removeprefix(prefix)
    return name


def token_map(folder: Path, tensors: Tensors, size: int, target: TargetShape) -> torch.Tensor:
    """Target ids of a head's `size` outputs: `d2t` holds offsets, target id = i + d2t[i]."""
    offsets = tensors.take_if_there("d2t", (size,))
    tensors.take_if_there("t2d", (target.vocab_size,))  # says the same the other way round
    ids = torch.arange(size)
    if offsets is None:
        if size != target.vocab_size:
            raise refused(
                folder, f"its {size} tokens are not the target's {target.vocab_size}, and it has "
                "no d2t to tell which they are",
            )  # fmt: skip
        return ids
    ids = ids + offsets.to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or len(set(ids.tolist())) != size:
        raise refused(
            folder, "d2t does not lead to as many different tokens of the target; it must hold "
            "offsets: target id = i + d2t[i]",
        )  # fmt: skip
    return ids
