"""The types by which the engine's parts speak of layers and ranks; imports none of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from cluster.records import frozen, record

# Every rank calls it with its own answer; it returns True if all ranks gave True.
Vote = Callable[[bool], bool]


@frozen
class LayerSpec:
    """One layer's storage on this rank, and how far it looks back.

    window: a key is visible iff query position - key position < window; None = no limit.
    is_convolution: of a token no key and value are kept, but what it brings into a causal
    convolution over its path, 2 * num_kv_heads * head_dim numbers; window: the kernel's size.
    state: the shape of the float32 matrix of all tokens before that stands beside them, at some
    borders of pages; None = there is none.
    is_latent: a token's so many numbers are key and value at once, of one head.
    shared_with: the layer before it whose keys and values it reads, None = it has its own.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    is_convolution: bool = False
    is_latent: bool = False
    shared_with: int | None = None
    state: tuple[int, int, int] | None = None

    @property
    def state_bytes(self) -> int:
        return math.prod(self.state) * torch.float32.itemsize if self.state else 0


@record
class AttentionOptions:
    """Per-layer arithmetic.  scores = softcap * tanh(q k * scaling / softcap) where softcap is set.

    sinks: [heads], a logit per head that takes part in the softmax and adds nothing to the sum.
    """

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
