"""The gated delta rule along the paths of a tree (Qwen3-Next, Qwen3.5).

A head keeps a matrix S [key_dim, value_dim] of all tokens before, its state.  A token with the key
k, the value v, the decay exp(g) and the strength beta makes of it
    exp(g) S + k u^T, where u = beta (v - exp(g) S^T k),
and reads that with its query (Yang et al. 2024, Gated Delta Networks).  What a token adds is its
own, as its key and value are for attention: so k, g and u lie in the paged cache, and a row reads
those of its path from the last border of a page on whose state is kept.  A state is made of
committed tokens alone and is never changed, so there is nothing to take back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cluster.engine.schedule.pieces import Piece
from cluster.engine.types import LayerSpec

_EPSILON = 1e-6  # transformers' own, beside the square of a key's length


def delta_layer(
    key_heads: int, key_dim: int, heads: int, value_dim: int, kernel: int, like: LayerSpec
) -> LayerSpec:
    """A layer's storage.  kernel: of its convolution.  like: of the same format and device.

    Of a token what it brings into the convolution, and its key; g and u in float32."""
    keys, words = key_heads * key_dim, torch.float32.itemsize // like.dtype.itemsize
    width = 3 * keys + heads * value_dim + heads * (1 + value_dim) * words
    return LayerSpec(
        1,
        -(-width // 2),
        like.dtype,
        like.device,
        kernel,
        is_convolution=True,
        state=(heads, key_dim, value_dim),
    )


def delta_rule(
    lines: torch.Tensor,
    states: torch.Tensor,
    pieces: Sequence[Piece],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """Compute the rows of a step, and write what they bring and the states at borders.

    lines: [slots, numbers], the layer's cache behind what goes into the convolution.  states:
    float32 [places, heads, key_dim, value_dim].  query, key: [rows, key heads, key_dim].  value:
    [rows, heads, value_dim].  decay: g, float32 [rows, heads].  beta: [rows, heads].
    Returns [rows, heads, value_dim]; zeros in rows of no text.
    """
    num_rows, heads, size = value.shape
    keys, scaling = key.shape[1:].numel(), math.sqrt(key.shape[2])
    wide = heads * (1 + size) * torch.float32.itemsize // lines.itemsize
    lines = lines[:, : keys + wide]
    output = states.new_zeros(num_rows + 1, heads, size)
    # One more row, of nobody: zeros, with which texts are padded.
    query, key, value, decay, beta = (
        torch.cat((each, each.new_zeros(1, *each.shape[1:])))
        for each in (query, key, value, decay.unsqueeze(2), beta.unsqueeze(2))
    )

    def by_head(each: torch.Tensor) -> torch.Tensor:
        """[texts, n, key heads or heads, d] -> float32 [texts, heads, n, d]"""
        return each.float().repeat_interleave(heads // each.shape[2], dim=2).transpose(1, 2)

    for piece in pieces:
        piece = piece.to(lines.device)
        rows, num_past = piece.rows, piece.past.shape[1]
        read = lines[piece.past]
        kept = read[..., keys:].contiguous().view(torch.float32)
        kept = kept.view(*read.shape[:2], heads, 1 + size)
        brought = torch.cat(
            (read[..., :keys].reshape(*read.shape[:2], *key.shape[1:]), key[rows].to(read)), 1
        )
        q, k = by_head(_unit(query[rows])) / scaling, by_head(_unit(brought))
        g = by_head(torch.cat((kept[..., :1], decay[rows]), dim=1)).mT  # [texts, heads, 1, keys]
        # How much of a token is left at each row, and of the state at the border: the decays of
        # those that the row sees behind it.
        steps = torch.where(piece.seen.unsqueeze(1), g, 0.0)  # [texts, heads, rows + 1, keys]
        behind = steps.flip(3).cumsum(3).flip(3) - steps
        left = torch.where(piece.seen.unsqueeze(1), behind.exp(), 0.0)
        left, left_at_end = left[:, :, :-1], left[:, :, -1:]
        of_state = steps.sum(dim=3, keepdim=True).exp()
        of_state, at_end = of_state[:, :, :-1], of_state[:, :, -1:]
        state, own_key, u = states[piece.states], k[:, :, num_past:], by_head(kept[..., 1:])
        weights, strength = own_key @ k.mT * left, by_head(beta[rows])
        told = of_state * (own_key @ state) + weights[..., :num_past] @ u
        # Rows bring what their path does not tell yet.  Ancestors stand before their descendants,
        # so that all are found at once.
        fresh = torch.linalg.solve_triangular(
            strength * weights[..., num_past:],
            strength * (by_head(value[rows]) - told),
            upper=False,
            unitriangular=True,
        )
        u = torch.cat((u, fresh), dim=2)
        output[rows] = (of_state * (q @ state) + (q @ k.mT * left) @ u).transpose(1, 2)
        exact = torch.cat((decay[rows], fresh.transpose(1, 2)), dim=3).flatten(2)
        line = key[rows].flatten(2).to(lines.dtype), exact.view(lines.dtype)
        lines[piece.slots] = torch.cat(line, dim=2)
        if piece.borders is not None:
            states[piece.borders] = at_end * state + (k.mT * left_at_end) @ u
    return output[:num_rows].to(value.dtype)


def _unit(each: torch.Tensor) -> torch.Tensor:
    """float32 of the length 1."""
    each = each.float()
    return each * torch.rsqrt(each.square().sum(dim=-1, keepdim=True) + _EPSILON)
