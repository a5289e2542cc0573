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
from itertools import pairwise

import numpy as np
import torch

from cluster.engine.schedule.batch import Batch, Share
from cluster.engine.types import LayerSpec
from cluster.records import record
from cluster.spec.transfer import sent

_EPSILON = 1e-6  # transformers' own, beside the square of a key's length
# Tokens whose mutual products are made at once, as many as transformers takes: a prompt's time
# grows with their number, that of all but the last piece with 1 / number.
_LONGEST = 64
# A text, and three places in it: where the part begins, its first row, and where it ends.
_Part = tuple[Share, int, int, int]


@record
class Piece:
    """Some rows of some texts, padded to equal numbers.

    states: int64[texts], where the matrix lies that they begin with.  past: int64[texts, past], the
    slots of tokens behind it that have been computed.  rows: int64[texts, rows], of the step; one
    more than its last = of nobody.  slots: int64[texts, rows], where they are written.  seen:
    bool[texts, rows + 1, past + rows], who sees whom; all that are of the text, in the last.
    borders: int64[texts], where the matrix behind them all is to lie; None = it is not kept.
    """

    states: torch.Tensor
    past: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    seen: torch.Tensor
    borders: torch.Tensor | None = None

    def to(self, device: torch.device) -> Piece:
        fields = [self.states, self.past, self.rows, self.slots, self.seen]
        if self.borders is not None:
            fields.append(self.borders)
        return Piece(*(each.to(device) for each in fields))


def pieces_of(batch: Batch, scratch_slot: int, device: torch.device) -> list[Piece]:
    """batch: at the slots of the layers' group.

    Each text is cut at the border whose state is to be kept, and what leads there further.  Texts
    run side by side where they have about as many rows."""
    groups: dict[tuple[int, bool, int], list[_Part]] = {}
    for share in batch.shares:
        cuts = [*range(share.border, share.next_border, _LONGEST), share.next_border, share.key_len]
        for number, (start, stop) in enumerate(pairwise(cuts)):
            first = min(max(start, share.key_len - share.num_rows), stop)
            key = number, start == share.next_border, (stop - first).bit_length()
            groups.setdefault(key, []).append((share, start, first, stop))
    return [_padded(groups[key], batch, scratch_slot, device) for key in sorted(groups)]


def _padded(parts: Sequence[_Part], batch: Batch, scratch_slot: int, device: torch.device) -> Piece:
    num_past = max(first - start for _, start, first, _ in parts)
    num_rows = max(stop - first for _, _, first, stop in parts)
    past = np.full((len(parts), num_past), scratch_slot)
    rows = np.full((len(parts), num_rows), batch.num_rows)
    seen = np.zeros((len(parts), num_rows + 1, num_past + num_rows), np.bool_)
    for text, (share, start, first, stop) in enumerate(parts):
        own, old, new = np.arange(first, stop), first - start, stop - first
        past[text, :old] = share.slots[start:first]
        rows[text, :new] = own - share.key_len + share.row_stop
        sees = np.arange(start, stop) <= own[:, None]
        if start == share.next_border and len(share.node_mask):
            sees[-len(share.node_mask) :, share.context_len - start :] = share.node_mask
        columns = np.r_[:old, num_past : num_past + new]
        seen[text, :new][:, columns] = sees
        seen[text, -1, columns] = True
    slots = np.append(batch.slots, scratch_slot)[rows]
    places = [share.state if start == share.border else share.spare for share, start, _, _ in parts]
    fields = [np.array(places), past, rows, slots, seen]
    share, start, _, _ = parts[0]
    if start < share.next_border:
        fields.append(np.array([share.spare for share, _, _, _ in parts]))
    return Piece(*(sent(each, device) for each in fields))


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
