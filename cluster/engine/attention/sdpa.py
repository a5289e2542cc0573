"""The reference backend: gathered keys and torch's scaled_dot_product_attention, on any device.

Sequences with few rows and similar context lengths share one padded call; a long prefill chunk
has its own.  Masks and key indices are built once per step and distinct window, not per layer.
Other backends are tested against this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from cluster.engine.attention.seam import AttentionBackend
from cluster.engine.schedule.batch import Batch, Share
from cluster.engine.types import AttentionOptions
from cluster.records import record

# Shares of more rows than this are attended alone: padding others to their width would cost more
# than a call does.
_MAX_GROUPED_ROWS = 64
# Groups hold shares whose key counts lie within one power of two, so padding at most doubles the
# work; below this many keys a call's overhead outweighs its arithmetic.
_MIN_BUCKET_KEYS = 256
# Up to so many rows the query heads that share a key head are folded into rows of one product,
# which spares copies of the keys; the mask grows by that factor.
_MAX_FOLDED_ROWS = 32


@record
class _Group:
    """Shares attended in one call, as tensors for one window and device.

    gather: int64[shares * width], for each padded row the batch row it copies.  scatter:
    int64[rows], where each row stands among the padded ones.  slots: int64[shares, keys].
    mask: [shares, 1, width, keys], 0 or -inf; None where everything is visible.
    """

    gather: torch.Tensor
    scatter: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """query: [heads, all rows, head_dim].  Returns [rows, heads, head_dim]."""
        num_shares, num_keys = self.slots.shape
        (heads, _, head_dim), kv_heads = query.shape, kv.shape[2]
        queries = query.index_select(1, self.gather)
        queries = queries.view(heads, num_shares, -1, head_dim).transpose(0, 1)
        own = kv.index_select(0, self.slots.flatten()).view(num_shares, num_keys, *kv.shape[1:])
        keys, values = own.transpose(1, 3).unbind(2)  # [shares, kv_heads, keys, head_dim]
        mask, sharing = self.mask, heads // kv_heads
        if queries.shape[2] <= _MAX_FOLDED_ROWS:
            queries = queries.reshape(num_shares, kv_heads, -1, head_dim)
            mask = None if mask is None else mask.repeat(1, 1, sharing, 1)
        else:  # 128 heads may share one, of which this makes no copies
            shape = (-1, -1, sharing, -1, -1)
            keys, values = (e.unsqueeze(2).expand(shape).flatten(1, 2) for e in (keys, values))
        if options.softcap is None and options.sinks is None:
            output = scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=options.scaling
            )
        else:
            output = _attend_explicitly(queries, keys, values, mask, options)
        output = output.reshape(num_shares, heads, -1, head_dim).transpose(1, 2)
        return output.flatten(0, 1).index_select(0, self.scatter)


class SdpaPlan:
    """One step's groups; tensors are made when a layer first needs them."""

    def __init__(self, batch: Batch, scratch_slot: int) -> None:
        self._shares = batch.shares
        self._scratch_slot = scratch_slot
        self._groups: dict[tuple[int | None, torch.device, torch.dtype], list[_Group]] = {}

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, window: int | None, options: AttentionOptions
    ) -> torch.Tensor:
        key = (window, query.device, query.dtype)
        if key not in self._groups:
            self._groups[key] = [
                _group(shares, window, self._scratch_slot, query.device, query.dtype)
                for shares in _grouped(self._shares)
            ]
        parts = [group.attend(query, kv, options) for group in self._groups[key]]
        heads, num_rows, head_dim = query.shape
        num_padding_rows = num_rows - (self._shares[-1].row_stop if self._shares else 0)
        padding = query.new_zeros(num_padding_rows, heads, head_dim)
        return torch.cat((*parts, padding))


class SdpaBackend(AttentionBackend):
    """Makes SdpaPlans."""

    name = "sdpa"

    def plan(self, batch: Batch, scratch_slot: int) -> SdpaPlan:
        return SdpaPlan(batch, scratch_slot)


def _attend_explicitly(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention spelled out, for what the fused kernels lack: capped logits and sinks.

    Gemma 2 (softcap on the scores before the mask) and gpt-oss (a sink logit per head).
    """
    scores = torch.matmul(queries, keys.transpose(2, 3)) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    if options.sinks is not None:
        # Of each query head, for each of its rows.
        width = scores.shape[1] * scores.shape[2] // len(options.sinks)
        sinks = options.sinks.repeat_interleave(width).view(1, *scores.shape[1:3], 1)
        sinks = sinks.expand(len(scores), -1, -1, -1)
        scores = torch.cat((scores, sinks.to(scores.dtype)), dim=-1)
    probs = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(probs[..., : keys.shape[2]], values)


def _grouped(shares: Sequence[Share]) -> Iterator[list[Share]]:
    """Runs of neighbouring shares that one call can serve."""

    def bucket(share: Share) -> int:
        if share.num_rows > _MAX_GROUPED_ROWS:
            return -1 - share.row_start  # its own
        return max(share.key_len, _MIN_BUCKET_KEYS).bit_length()

    return (list(group) for _, group in groupby(shares, bucket))


def _group(
    shares: Sequence[Share],
    window: int | None,
    scratch_slot: int,
    device: torch.device,
    dtype: torch.dtype,
) -> _Group:
    seen = [share.visible(window) for share in shares]
    width, num_keys = (max(each.shape[axis] for each in seen) for axis in (0, 1))
    slots = np.full((len(shares), num_keys), scratch_slot, dtype=np.int64)
    visible = np.zeros((len(shares), width, num_keys), dtype=np.bool_)
    is_row = np.zeros((len(shares), width), dtype=np.bool_)
    for place, (share, own) in enumerate(zip(shares, seen, strict=True)):
        num_rows, num_own = own.shape
        slots[place, :num_own] = share.slots[-num_own:]
        visible[place, :, :num_own] = own[0]  # padding rows are copies of the first
        visible[place, :num_rows, :num_own] = own
        is_row[place, :num_rows] = True
    starts = np.array([[share.row_start] for share in shares])
    gather = np.where(is_row, starts + np.arange(width), starts)
    additive = np.where(visible, np.float32(0), np.float32("-inf"))
    return _Group(
        torch.from_numpy(gather.ravel()).to(device),
        torch.from_numpy(np.flatnonzero(is_row)).to(device),
        torch.from_numpy(slots).to(device),
        None
        if visible.all()
        else torch.from_numpy(additive).unsqueeze(1).to(device=device, dtype=dtype),
    )
