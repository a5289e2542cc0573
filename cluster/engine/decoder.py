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


def is_known(kind: type) -> bool:
    """True of a model's class that consists of such layers."""
    return f"{kind.__module__}.{kind.__qualname__}" in _CLASSES


def decoder_of(module: Any) -> Any:
    """What stands before the output layer: embedding, layers, norm and nothing else; or None."""
    base = getattr(module, "model", None)
    if (
        {name for name, _ in module.named_children()} != {"model", "lm_head"}
        or base is None
        or {name for name, _ in base.named_children()} != _BASE_CHILDREN
        or type(base.embed_tokens) is not torch.nn.Embedding
        or any(each._forward_hooks or each._forward_pre_hooks for each in (module, base))
    ):
        return None
    return base


def layer_parts(layer: torch.nn.Module, also: frozenset[str] = frozenset()) -> LayerParts | None:
    """None for a layer of another kind.  also: names that its attention has beside its own."""
    children: dict[str, Any] = dict(layer.named_children())
    if children.keys() - _DROPOUTS != _CHILDREN or layer._forward_hooks or layer._forward_pre_hooks:
        return None
    attention = children["self_attn"]
    parts = dict(attention.named_children())
    index, head_dim = (getattr(attention, name, None) for name in ("layer_idx", "head_dim"))
    if (
        parts.keys() - _OWN_NORMS not in ({*own[0], "o_proj", *also} for own in (_APART, _JOINED))
        or not isinstance(index, int)
        or not isinstance(head_dim, int)
    ):
        return None
    norms = children["input_layernorm"], children["post_attention_layernorm"]
    own_norms = parts.get("q_norm"), parts.get("k_norm")
    return LayerParts(*norms, *own_norms, attention, children["mlp"], head_dim, index)


def has_fixed_rotations(rotary: Any) -> bool:
    """True if a position's cosines and sines depend on nothing else."""
    kind = getattr(rotary, "rope_type", None)  # of several kinds of layers: a mapping
    return isinstance(kind, str) and kind in _FIXED_ROTATIONS
