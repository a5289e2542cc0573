"""The multi-token-prediction layer in a target's own checkpoint: one more decoder layer, which says
what follows the next token (DeepSeek-AI 2024).

A row at position t takes the embedding of token t + 1 and the target's row of position t behind its
final norm; for drafted tokens its own output stands in for that row, as in EAGLE.  The decoder
layer itself is transformers' of the target's architecture.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cluster.draft.heads.checkpoint import (
    HeadConfig,
    TargetShape,
    TargetWeight,
    Tensors,
    held_in,
    refused,
)
from cluster.draft.heads.head import Head, HeadSpec
from cluster.engine.attention import seam
from cluster.records import frozen


@frozen
class Layout:
    """How a family of checkpoints stores the layer.

    prefix: of its tensors; {} is the target's number of layers.  names: of what is not the decoder
    layer, by our name.  block: the decoder layer's, behind the prefix.
    skips_first_embedding: the row at position 0 takes no embedding.
    hands_on_normed: the row handed on to the next draft is normalised.
    """

    prefix: str
    names: Mapping[str, str]
    block: str
    skips_first_embedding: bool
    hands_on_normed: bool

    @property
    def mark(self) -> str:
        """The tensor by which it is recognised."""
        return f"{self.prefix}{self.names['joint.weight']}"


# DeepSeek-V3, GLM-4.5 and later: a layer behind the last.
_NEXTN = Layout(
    "model.layers.{}.",
    {
        "embedding_norm.weight": "enorm.weight",
        "hidden_norm.weight": "hnorm.weight",
        "joint.weight": "eh_proj.weight",
        "norm.weight": "shared_head.norm.weight",
        "lm_head.weight": "shared_head.head.weight",
        "embed_tokens.weight": "embed_tokens.weight",
    },
    "",
    skips_first_embedding=True,
    hands_on_normed=False,
)
# Qwen3-Next and Qwen3.5: apart from the layers; the embedding and the output are the target's.
_MTP = Layout(
    "mtp.",
    {
        "embedding_norm.weight": "pre_fc_norm_embedding.weight",
        "hidden_norm.weight": "pre_fc_norm_hidden.weight",
        "joint.weight": "fc.weight",
        "norm.weight": "norm.weight",
    },
    "layers.0.",
    skips_first_embedding=False,
    hands_on_normed=True,
)
LAYOUTS = (_NEXTN, _MTP)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpSpec(HeadSpec):
    """layers: the target's text configuration, with this as its only layer."""

    skips_first_embedding: bool


class MtpHead(Head):
    """It writes the target's whole vocabulary."""

    spec: MtpSpec

    def __init__(self, spec: MtpSpec, embedding: torch.Tensor, output: torch.Tensor) -> None:
        from transformers import AutoModel

        seam.register()
        config = spec.layers
        with torch.device("meta"):
            model = AutoModel.from_config(config, attn_implementation=seam.IMPLEMENTATION)
        norm, size, eps = type(model.norm), config.hidden_size, config.rms_norm_eps
        # Its tables are no weights, so that they have to be computed.
        rotary = type(model.rotary_emb)(config)
        super().__init__(spec, embedding, output, [model.layers[0]], rotary, norm(size, eps))
        self.embedding_norm, self.hidden_norm = norm(size, eps), norm(size, eps)
        self.joint = nn.Linear(2 * size, size, bias=False)

    def entered(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """See `Head`."""
        embedded = self.embed_tokens(token_ids)
        if self.spec.skips_first_embedding:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        joint: torch.Tensor = self.joint(both)
        return joint


def layer_of(folder: Path) -> Any:
    """The target's text configuration, with one layer of full attention."""
    from transformers import AutoConfig

    config = copy.deepcopy(AutoConfig.from_pretrained(folder).get_text_config())
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    if not getattr(config, "head_dim", None):
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def load(folder: Path, target: TargetShape, weight: TargetWeight) -> MtpHead:
    """The layer of a checkpoint.  weight: the target's, for the embedding and the output layer.

    Raises ConfigError where the checkpoint has none, or one that does not fit the target.
    """
    layer, config = layer_of(folder), HeadConfig(folder)
    config.size("hidden_size", layer.hidden_size, target.hidden_size)
    config.size("vocab_size", layer.vocab_size, target.vocab_size)
    layout, tensors = _stored(folder, target.num_layers)
    has_experts = any(name.startswith("layers.0.mlp.experts.") for name in tensors.held)
    # Which layers have experts is told by their numbers, and this one's is another now.
    layer.first_k_dense_replace = 0 if has_experts else 1
    layer.mlp_only_layers = [] if has_experts else [0]
    layer.decoder_sparse_step = 1
    spec = MtpSpec(
        layers=layer,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        norms_output=layout.hands_on_normed,
        skips_first_embedding=layout.skips_first_embedding,
    )
    shape = (target.vocab_size, target.hidden_size)
    shared = {"embed_tokens.weight": "embedding", "lm_head.weight": "output"}
    head = MtpHead(
        spec, *(tensors.take_or_share(name, shape, weight, like) for name, like in shared.items())
    )
    for name in head.state_dict():
        _join_experts(tensors, name)
    tensors.fill(head, {"token_map": head.token_map}, shared, assign=True)
    return head.requires_grad_(False).eval()


def _stored(folder: Path, num_layers: int) -> tuple[Layout, Tensors]:
    """How the layer is stored, and its tensors by our names."""
    for layout in LAYOUTS:
        prefix = layout.prefix.format(num_layers)
        ours = {theirs: own for own, theirs in layout.names.items()}
        held: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            for key, tensor in held_in(path, prefix=prefix).items():
                rest = key.removeprefix(prefix)
                held[ours.get(rest, f"layers.0.{rest.removeprefix(layout.block)}")] = tensor
        if "joint.weight" in held:
            return layout, Tensors(folder, held)
    marks = " or ".join(layout.mark.format(num_layers) for layout in LAYOUTS)
    raise refused(folder, f"it has no multi-token-prediction layer (a tensor {marks})")


def _join_experts(tensors: Tensors, name: str) -> None:
    """Put experts that are stored one by one together, as transformers holds them."""
    base, dot, last = name.rpartition(".experts.")
    if not dot or name in tensors.held:
        return
    parts: Sequence[str] = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    experts: list[torch.Tensor] = []
    while True:
        names = [f"{base}.experts.{len(experts)}.{part}.weight" for part in parts]
        if not all(each in tensors.held for each in names):
            break
        experts.append(torch.cat([tensors.held.pop(each) for each in names]))
    if experts:
        tensors.held[name] = torch.stack(experts)
