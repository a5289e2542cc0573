"""How long steps of models of 8B would take on one H100: estimates, for no card has run them.

A product takes as long as its weights take to read or its arithmetic takes, whichever is more;
attention takes as long as the keys and values of the context; every other kernel takes the same
time.  How many there are was traced; the rates are assumptions, until `benchmarks/gpu` has run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.support.gpu import table as held
from tests.support.gpu.models import config_of, head_dim_of

MODELS = "Llama-3.1-8B", "Qwen3-8B"
CONTEXT_LEN = 1024
# An H100 (SXM) reads 3.35 TB/s and multiplies 989 T numbers of bfloat16 a second at best; of that
# products of few rows reach so much in other engines' records.
PEAK_BYTES_PER_S = 3.35e12
BYTES_PER_S, FLOPS_PER_S = 0.8 * PEAK_BYTES_PER_S, 0.6 * 989e12
# From the start of a small kernel to that of the next one inside a graph.
KERNEL_S = 1.9e-6
# Of a fused layer: queries, keys and values at once; what attention says; gate and up; down.
LAYER_PRODUCTS = 4
# An EAGLE-3 head as published for these: one layer over rows of twice the width, and a vocabulary
# of its own for drafts.  Its trees grow in four passes.
HEAD_VOCAB_SIZE, HEAD_PASSES = 32_000, 4
# By `tests.support.gpu.host` on an AMD EPYC (Zen 3), ms of a step beside the forward, the middle of
# four runs: texts to those of a plain step, to how many nodes of each text a step in a graph has,
# and to its own.
HOST_MS: Mapping[int, tuple[float, int, float]] = {
    1: (0.52, 8, 0.64),
    8: (1.05, 8, 1.49),
    32: (2.23, 7, 3.52),
}


def layer_size(config: Any, *, widths: int = 1) -> int:
    """Numbers in a layer's products.  widths: of what attention reads, in hidden sizes."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention = (widths * (heads + 2 * kv_heads) + heads) * head_dim_of(config)
    return int(config.hidden_size * (attention + 3 * config.intermediate_size))


def products_s(size: int, rows: int) -> float:
    """Of so many weights in bfloat16, over so many rows."""
    return max(2 * size / BYTES_PER_S, 2 * size * rows / FLOPS_PER_S)


class Estimate:
    """Of a model.  counts: its row of the table."""

    def __init__(self, name: str, counts: held.Table) -> None:
        config = self._config = config_of(name)
        layers = config.num_hidden_layers
        small = counts["kernels a layer"] - LAYER_PRODUCTS
        self._small = layers * small + counts["kernels outside of layers"]
        self._size = layers * layer_size(config) + config.vocab_size * config.hidden_size
        kv_size = layers * 2 * config.num_key_value_heads * head_dim_of(config)
        self._context_bytes = 2 * kv_size * CONTEXT_LEN

    def bound_s(self, texts: int) -> float:
        """What the bytes of a plain step take at least."""
        return (2 * self._size + texts * self._context_bytes) / PEAK_BYTES_PER_S

    def forward_s(self, texts: int, nodes: int = 0) -> float:
        context_s = texts * self._context_bytes / BYTES_PER_S
        products = products_s(self._size, texts * (1 + nodes))
        return products + context_s + self._small * KERNEL_S

    def head_s(self, texts: int, nodes: int, kernels: int) -> float:
        """A round of a head.  kernels: of a round, traced."""
        config = self._config
        layer = layer_size(config, widths=2) + HEAD_VOCAB_SIZE * config.hidden_size
        read_s = products_s(3 * config.hidden_size**2, texts)
        per_pass = texts * nodes // HEAD_PASSES
        return read_s + HEAD_PASSES * products_s(layer, per_pass) + kernels * KERNEL_S


def rows(found: held.Table) -> Iterator[tuple[str, ...]]:
    """Of the page's table."""
    kernels = found["heads"]["EAGLE-3"]["kernels"]
    for name in MODELS:
        estimate = Estimate(name, found["architectures"][name])
        for texts, (plain_host_ms, nodes, host_ms) in HOST_MS.items():
            forward_ms = 1e3 * estimate.forward_s(texts)
            plain_ms = forward_ms + plain_host_ms
            drafted_ms = 1e3 * estimate.forward_s(texts, nodes) + host_ms
            drafted_ms += 1e3 * estimate.head_s(texts, nodes, kernels)
            yield (
                name,
                str(texts),
                f"{1e3 * estimate.bound_s(texts):.1f}",
                f"{forward_ms:.1f}",
                f"{plain_host_ms:.1f}",
                f"{1e3 * texts / plain_ms:,.0f}",
                f"{1e3 * texts / max(forward_ms, plain_host_ms):,.0f}",
                f"{drafted_ms / plain_ms:.2f}, {nodes}",
            )
