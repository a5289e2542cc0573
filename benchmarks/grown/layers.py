"""The algebra of `benchmarks.grown`: the weights of a larger Llama that computes the same function.

Let d be the source's width and H the grown one's, h the source's residual and h' = [h, 0] the grown
one's.  mean(h'^2) = mean(h^2) * d / H, so with eps' = eps * d / H and w' = [w * sqrt(d / H), any]

    w' * h' / sqrt(mean(h'^2) + eps') = [w * h / sqrt(mean(h^2) + eps), 0]

which is the source's norm followed by zeros.  So columns of a projection that read the padding may
have any value; rows that write to the padding must be zero, and so must the columns of o_proj and
down_proj that read a new head or neuron.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from cluster.records import frozen

Weights = dict[str, torch.Tensor]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_FILL_STD = 0.02
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@frozen
class Shape:
    """The sizes of a Llama; the head dimension is the source's."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int


# The head dimension stays 64, so the 8B shape has twice as many heads as Llama, of half the width:
# the projections and the KV cache have the same size.
SHAPES = {
    "231m": Shape(1024, 16, 16, 4, 3760),
    "1b": Shape(2048, 16, 32, 8, 8192),
    "8b": Shape(4096, 32, 64, 16, 14336),
}


@frozen
class HeadPlaces:
    """The positions of the source's heads.

    query: element j is the grown query head that copies the source's head j.  key_value: element k
    is the source's head that grown key/value head k copies, for the first len(key_value) heads.
    """

    query: tuple[int, ...]
    key_value: tuple[int, ...]


def place_heads(source: Shape, grown: Shape) -> HeadPlaces:
    """Keep every query head with its key/value head, for any two ratios.

    Query head j reads key/value head j // ratio.  If the grown ratio is smaller, key/value heads of
    the source are copied as often as needed.  Raises ValueError if there is no room.
    """
    for name, shape in (("source", source), ("grown", grown)):
        if shape.heads % shape.kv_heads:
            raise ValueError(f"{name}: {shape.heads} heads do not share {shape.kv_heads} evenly")
    readers = source.heads // source.kv_heads
    ratio = grown.heads // grown.kv_heads
    copies = math.ceil(readers / ratio)
    if source.kv_heads * copies > grown.kv_heads:
        raise ValueError(
            f"{grown.heads} heads over {grown.kv_heads} key/value heads cannot hold "
            f"{source.heads} over {source.kv_heads}; {source.kv_heads * copies} are needed"
        )
    query = []
    for head in range(source.heads):
        group, place = divmod(head, readers)
        query.append((group * copies + place // ratio) * ratio + place % ratio)
    return HeadPlaces(
        tuple(query), tuple(head // copies for head in range(source.kv_heads * copies))
    )


class Grower:
    """Grows one model deterministically.  Keeps only the source in memory."""

    def __init__(self, source: Path, shape: Shape, seed: int) -> None:
        """Raises ValueError if `source` is not a plain Llama or does not fit into `shape`."""
        self._folder = source
        self._seed = seed
        self.shape = shape
        self.source_config = AutoConfig.from_pretrained(source)
        _check_plain(self.source_config)
        self._source_shape = shape_of(self.source_config)
        for name, value in asdict(shape).items():
            if value < getattr(self._source_shape, name):
                raise ValueError(f"{name} {value} is less than the source's; nothing can shrink")
        if shape.hidden % shape.heads:  # transformers refuses it for any head dimension
            raise ValueError(f"hidden {shape.hidden} is no multiple of the {shape.heads} heads")
        self._places = place_heads(self._source_shape, shape)
        self._head_dim: int = self.source_config.head_dim
        self._weights = _load(source)
        self._norm_scale = math.sqrt(self._source_shape.hidden / shape.hidden)
        self.grown_config = LlamaConfig(**self._fields())

    def config(self, dtype: str, seed: int) -> dict[str, Any]:
        """The grown config.json, labelled with what it was grown from."""
        source = {
            "model": self._folder.resolve().name,
            "parameters": sum(tensor.numel() for tensor in self._weights.values()),
            "shape": asdict(self._source_shape),
            "seed": seed,
        }
        return self._fields() | {"dtype": dtype, "grown_from": source}

    def parts(self) -> Iterator[Weights]:
        """The grown weights in float32, one part at a time: embedding, each layer, the end."""
        name = "model.embed_tokens.weight"
        rows = torch.zeros(len(self._weights[name]), self.shape.hidden)
        yield {name: self._pasted(name, rows)}
        for layer in range(self.shape.layers):
            yield self._layer(layer)
        yield self._end()

    def source_parts(self) -> Iterator[Weights]:
        """The source's weights in the same order."""
        yield {"model.embed_tokens.weight": self._weights["model.embed_tokens.weight"]}
        for layer in range(self._source_shape.layers):
            prefix = f"model.layers.{layer}."
            yield {key: value for key, value in self._weights.items() if key.startswith(prefix)}
        yield {key: self._weights[key] for key in ("model.norm.weight",)} | {
            key: self._weights[key] for key in ("lm_head.weight",) if key in self._weights
        }

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads((self._folder / "config.json").read_text("utf-8"))
        return fields | {
            "hidden_size": self.shape.hidden,
            "num_hidden_layers": self.shape.layers,
            "num_attention_heads": self.shape.heads,
            "num_key_value_heads": self.shape.kv_heads,
            "intermediate_size": self.shape.intermediate,
            "head_dim": self._head_dim,
            "rms_norm_eps": self.source_config.rms_norm_eps
            * self._source_shape.hidden
            / self.shape.hidden,
        }

    def _pasted(self, name: str, grown: torch.Tensor) -> torch.Tensor:
        """With the source's values at the beginning of every dimension, where it has some."""
        own = self._weights.get(name)
        if own is not None:
            grown[tuple(map(slice, own.shape))] = own
        return grown

    def _end(self) -> Weights:
        fill = _Fill(self._seed, self.shape.layers)
        weights = {"model.norm.weight": self._norm("model.norm.weight", fill)}
        if "lm_head.weight" in self._weights:
            grown = fill.matrix(len(self._weights["lm_head.weight"]), self.shape.hidden)
            weights["lm_head.weight"] = self._pasted("lm_head.weight", grown)
        return weights

    def _layer(self, layer: int) -> Weights:
        prefix = f"model.layers.{layer}."
        fill = _Fill(self._seed, layer)
        weights = {
            f"{prefix}{name}.weight": self._norm(f"{prefix}{name}.weight", fill)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        attention = self._attention(f"{prefix}self_attn.", fill)
        return weights | attention | self._mlp(f"{prefix}mlp.", fill)

    def _norm(self, name: str, fill: _Fill) -> torch.Tensor:
        # The inputs of the new entries are zero; 1 is about the average of the others.
        return self._norm_scale * self._pasted(name, 1 + fill.matrix(1, self.shape.hidden)[0])

    def _attention(self, prefix: str, fill: _Fill) -> Weights:
        old, new, dim = self._source_shape, self.shape, self._head_dim
        query = fill.matrix(new.heads * dim, new.hidden).view(new.heads, dim, -1)
        key = fill.matrix(new.kv_heads * dim, new.hidden).view(new.kv_heads, dim, -1)
        value = fill.matrix(new.kv_heads * dim, new.hidden).view(new.kv_heads, dim, -1)
        output = torch.zeros(new.hidden, new.heads, dim)
        if f"{prefix}q_proj.weight" in self._weights:
            q, k, v, o = (self._weights[f"{prefix}{name}.weight"] for name in _PROJECTIONS)
            places, copied = list(self._places.query), list(self._places.key_value)
            query[places, :, : old.hidden] = q.view(old.heads, dim, -1)
            key[: len(copied), :, : old.hidden] = k.view(old.kv_heads, dim, -1)[copied]
            value[: len(copied), :, : old.hidden] = v.view(old.kv_heads, dim, -1)[copied]
            output[: old.hidden, places] = o.view(old.hidden, old.heads, dim)
        grown = (query, key, value)
        weights = {
            f"{prefix}{name}.weight": tensor.flatten(0, 1)
            for name, tensor in zip(_PROJECTIONS[:3], grown, strict=True)
        }
        return weights | {f"{prefix}o_proj.weight": output.flatten(1)}

    def _mlp(self, prefix: str, fill: _Fill) -> Weights:
        hidden, inner = self.shape.hidden, self.shape.intermediate
        grown = {
            "gate_proj": fill.matrix(inner, hidden),
            "up_proj": fill.matrix(inner, hidden),
            "down_proj": torch.zeros(hidden, inner),
        }
        names = {name: f"{prefix}{name}.weight" for name in grown}
        return {names[name]: self._pasted(names[name], tensor) for name, tensor in grown.items()}


class _Fill:
    """Small random numbers for one part, equal in every run."""

    def __init__(self, seed: int, part: int) -> None:
        self._generator = torch.Generator().manual_seed(seed * 100_003 + part)

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self._generator) * _FILL_STD


def shape_of(config: Any) -> Shape:
    """The shape in a Llama's config."""
    return Shape(
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.intermediate_size,
    )


def logits_of(
    config: Any, parts: Iterable[Weights], texts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """float32[len(text), vocab] per text; keeps the weights of one part in memory at a time."""
    stream = iter(parts)
    embedding = next(stream)["model.embed_tokens.weight"].float()
    states = [embedding[list(text)][None] for text in texts]  # [1, len, hidden]
    rotary = LlamaRotaryEmbedding(config)
    turns = [rotary(state, torch.arange(state.shape[1])[None]) for state in states]
    config._attn_implementation = "sdpa"
    end: Weights = {}
    with torch.inference_mode():
        for weights in stream:
            if "model.norm.weight" in weights:
                end = weights
                break
            layer = _module(LlamaDecoderLayer(config, 0), weights)
            states = [
                layer(state, attention_mask=None, position_embeddings=turn)
                for state, turn in zip(states, turns, strict=True)
            ]
        norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        norm.weight.copy_(end["model.norm.weight"])
        head = end.get("lm_head.weight", embedding).float()
        return [norm(state)[0] @ head.T for state in states]


def _module(layer: torch.nn.Module, weights: Weights) -> torch.nn.Module:
    state = {key.split(".", 3)[3]: tensor.float() for key, tensor in weights.items()}
    layer.load_state_dict(state, assign=True)
    return layer


def _check_plain(config: Any) -> None:
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise ValueError(
            f"only Llamas without biases can be grown, this is {config.model_type!r}"
            f" (attention_bias {getattr(config, 'attention_bias', None)})"
        )


def _load(folder: Path) -> Weights:
    weights: Weights = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights |= {key: tensor.float() for key, tensor in load_file(file).items()}
    return weights
