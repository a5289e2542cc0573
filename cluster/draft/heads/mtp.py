"""The multi-token-prediction layer in a target's own checkpoint: one more decoder layer, which says
what follows the next token (DeepSeek-AI 2024).

A row at position t takes the embedding of token t + 1 and the target's row of position t behind its
final norm; for drafted tokens its own output stands in for that row, as in EAGLE.  The decoder
layer itself is transformers' of the target's architecture.

GLM-4.5 and DeepSeek V3 store it behind the last layer, Qwen3-Next and Qwen3.5 apart.  The latter
hand on the output behind its norm, and their row at position 0 takes its embedding too.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cluster.draft.heads.checkpoint import HeadConfig, HeadTarget, Tensors, held_in
from cluster.draft.heads.head import Head, HeadSpec
from cluster.engine.attention import latent, seam
from cluster.engine.loading.model_config import served_part

# Of what is not the decoder layer, the names where it stands behind the last layer, those where it
# is stored apart, and ours.
_NAMES = {
    "enorm.weight": "embedding_norm.weight",
    "hnorm.weight": "hidden_norm.weight",
    "eh_proj.weight": "joint.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed_tokens.weight",
    "pre_fc_norm_embedding.weight": "embedding_norm.weight",
    "pre_fc_norm_hidden.weight": "hidden_norm.weight",
    "fc.weight": "joint.weight",
    "norm.weight": "norm.weight",
}


_EXPERTS = "layers.0.mlp.experts."


class MtpHead(Head):
    """It writes the target's whole vocabulary."""

    def __init__(self, spec: HeadSpec, embedding: torch.Tensor, output: torch.Tensor) -> None:
        """spec: its layers are the target's text configuration, with this as its only layer."""
        from transformers import AutoModel

        seam.register()
        config = spec.layers
        with torch.device("meta"):
            model = AutoModel.from_config(config, attn_implementation=seam.IMPLEMENTATION)
        latent.adopt(model)
        norm, size, eps = type(model.norm), config.hidden_size, config.rms_norm_eps
        # Its tables are no weights, so that they have to be computed.
        rotary = type(model.rotary_emb)(config)
        super().__init__(spec, embedding, output, [model.layers[0]], rotary, norm(size, eps))
        self.embedding_norm, self.hidden_norm = norm(size, eps), norm(size, eps)
        self.joint = nn.Linear(2 * size, size, bias=False)

    def entered(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """See `Head`; of a layer behind the last the row at position 0 takes no embedding."""
        embedded = self.embed_tokens(token_ids)
        if not _is_apart(self.spec.layers):
            embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        return self.joint(
            torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        )


def _is_apart(text_config: Any) -> bool:
    """True if models of this architecture store the layer apart, and use it so."""
    model_type: str = text_config.model_type
    return model_type.startswith(("qwen3_next", "qwen3_5"))


def layers_of(config: HeadConfig) -> Any:
    """The target's text configuration, with one layer of full attention."""
    from transformers import AutoConfig

    layer = copy.deepcopy(served_part(AutoConfig.from_pretrained(config.folder)))
    layer.num_hidden_layers = 1
    if getattr(layer, "layer_types", None):
        layer.layer_types = ["full_attention"]
    return layer


def load(config: HeadConfig, target: HeadTarget) -> MtpHead:
    """The layer of the target's checkpoint; raises ConfigError where it has none, or one that does
    not fit the target."""
    layer = layers_of(config)
    config.size("hidden_size", layer.hidden_size, target.hidden_size)
    config.size("vocab_size", layer.vocab_size, target.vocab_size)
    if getattr(layer, "mtp_use_dedicated_embeddings", False):
        raise config.refused(
            "it says mtp_use_dedicated_embeddings, and how checkpoints name those is not known"
        )
    method = getattr(layer, "quantization_config", None) or {}
    mark = "mtp.fc" if _is_apart(layer) else f"model.layers.{target.num_layers}.eh_proj"
    tensors = _stored(config, mark, method.get("weight_block_size"), target)
    has_experts = any(name.startswith(_EXPERTS) for name in tensors.held)
    # Which layers have experts is told by their numbers, and this one's is another now.
    layer.first_k_dense_replace = 0 if has_experts else 1
    layer.mlp_only_layers = [] if has_experts else [0]
    layer.mlp_layer_types = ["sparse" if has_experts else "dense"]
    layer.decoder_sparse_step = 1
    spec = HeadSpec(
        layers=layer,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        norms_output=_is_apart(layer),
    )
    return MtpHead.filled(spec, tensors).requires_grad_(False)


def _stored(
    config: HeadConfig, mark: str, block: Sequence[int] | None, target: HeadTarget
) -> Tensors:
    """The layer's tensors by our names.  mark: what joins its inputs, beside which all are.  block:
    rows and columns with a scale, None = none have."""
    prefix = mark[: mark.rindex(".") + 1]
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(config.folder.glob("*.safetensors")):
        stored |= held_in(path, target.device, prefix)
    _widen(stored, block or ())
    held: dict[str, torch.Tensor] = {}
    for key, tensor in stored.items():
        name = key.removeprefix(prefix)
        own = name if name.startswith("layers.") else f"layers.0.{name}"
        held[_NAMES.get(name, own)] = tensor
    if "joint.weight" not in held:
        raise config.refused(f"it has no multi-token-prediction layer (a tensor {mark}.weight)")
    _join_experts(held, "gate_up_proj", "gate_proj", "up_proj")
    _join_experts(held, "down_proj", "down_proj")
    return Tensors(config.folder, held, target)


def _widen(held: dict[str, torch.Tensor], block: Sequence[int]) -> None:
    """Bring weights of 8 bits with a scale for each block, as DeepSeek-V3's are, to bfloat16."""
    for name in [name for name in held if block and name.endswith("_scale_inv")]:
        scales, weight = held.pop(name), held[name.removesuffix("_scale_inv")]
        for dim, size in enumerate(block, -2):
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
        held[name.removesuffix("_scale_inv")] = (weight.float() * scales).bfloat16()


def _join_experts(held: dict[str, torch.Tensor], joined: str, *parts: str) -> None:
    """Put experts that are stored one by one together, as transformers holds them."""
    experts: list[torch.Tensor] = []
    while True:
        names = [f"{_EXPERTS}{len(experts)}.{part}.weight" for part in parts]
        if not all(each in held for each in names):
            break
        experts.append(torch.cat([held.pop(each) for each in names]))
    if experts:
        held[f"{_EXPERTS}{joined}"] = torch.stack(experts)
