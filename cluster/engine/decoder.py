"""The decoder that most models share, as transformers builds it: recognised by class and by names.

Layers of the Llama family: RMS norm, q k v, rotation by halves, attention, residual, RMS norm,
gated feed-forward, residual; with biases or norms of queries and keys where a model has them.  Only
model classes that are known to consist of nothing else are asked; what computes them in another way
is held to the model's own forward by the check at load (`cluster.engine.loading.self_check`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

# Classes of transformers whose layers and positions are those.  A class is added with a checkpoint
# of it in the tests.
_CLASSES = frozenset(
    f"transformers.models.{name}.modeling_{name}.{prefix}ForCausalLM"
    for name, prefix in (
        ("llama", "Llama"),
        ("mistral", "Mistral"),
        ("phi3", "Phi3"),
        ("qwen2", "Qwen2"),
        ("qwen3", "Qwen3"),
        ("smollm3", "SmolLM3"),
    )
)
_BASE_CHILDREN = {"embed_tokens", "layers", "norm", "rotary_emb"}
_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_DROPOUTS = {"resid_attn_dropout", "resid_mlp_dropout"}  # which do nothing here
# Those of one input: of attention and of the feed-forward, one by one or joined.
_APART = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_JOINED = ("qkv_proj",), ("gate_up_proj",)
_OWN_NORMS = {"q_norm", "k_norm"}
# The name of the product of the first three, which stands beside them where our kernels make it.
JOINED = "qkv_product"
# Rotations whose frequencies never change; others look at how long the text is.
_FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})


class LayerParts(NamedTuple):
    """The modules of a recognised layer, whatever they now are, and its number.  attention: holds
    the products."""

    input_norm: Any
    post_norm: Any
    query_norm: Any
    key_norm: Any
    attention: Any
    mlp: Any
    head_dim: int
    layer: int

    @property
    def norms(self) -> tuple[Any, ...]:
        """Of the input, of the feed-forward's, of queries and of keys; None = there is none."""
        return self[:4]

    @property
    def inputs(self) -> list[list[Any]]:
        """The products of one input, of attention and of the feed-forward; None = one that is not
        there."""
        names = _JOINED if hasattr(self.attention, "qkv_proj") else _APART
        modules = self.attention, self.mlp
        return [
            [getattr(module, name, None) for name in own]
            for module, own in zip(modules, names, strict=True)
        ]


class Decoder(NamedTuple):
    """A recognised model.  base: what stands before the output layer.  layers: None = of another
    kind."""

    base: Any
    layers: list[LayerParts | None]


def is_known(kind: type) -> bool:
    """True of a model's class that consists of such layers."""
    return f"{kind.__module__}.{kind.__qualname__}" in _CLASSES


def decoder_of(module: Any) -> Decoder | None:
    """None unless before the output layer stand embedding, layers, norm and nothing else, and a
    position's cosines and sines depend on nothing else."""
    base = getattr(module, "model", None)
    if (
        not is_known(type(module))
        or {name for name, _ in module.named_children()} != {"model", "lm_head"}
        or base is None
        or {name for name, _ in base.named_children()} != _BASE_CHILDREN
        or type(base.embed_tokens) is not torch.nn.Embedding
        or any(each._forward_hooks or each._forward_pre_hooks for each in (module, base))
    ):
        return None
    rotation = getattr(base.rotary_emb, "rope_type", None)  # of several kinds of layers: a mapping
    if not isinstance(rotation, str) or rotation not in _FIXED_ROTATIONS:
        return None
    return Decoder(base, list(map(_layer_parts, base.layers)))


def _layer_parts(layer: torch.nn.Module) -> LayerParts | None:
    children: dict[str, Any] = dict(layer.named_children())
    if children.keys() - _DROPOUTS != _CHILDREN or layer._forward_hooks or layer._forward_pre_hooks:
        return None
    attention = children["self_attn"]
    parts = dict(attention.named_children())
    index, head_dim = (getattr(attention, name, None) for name in ("layer_idx", "head_dim"))
    if (
        parts.keys() - {*_OWN_NORMS, JOINED}
        not in ({*own[0], "o_proj"} for own in (_APART, _JOINED))
        or not isinstance(index, int)
        or not isinstance(head_dim, int)
    ):
        return None
    norms = children["input_layernorm"], children["post_attention_layernorm"]
    own_norms = parts.get("q_norm"), parts.get("k_norm")
    return LayerParts(*norms, *own_norms, attention, children["mlp"], head_dim, index)
