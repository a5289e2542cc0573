"""The reference backend: gathered keys and torch's scaled_dot_product_attention, on any device.

Sequences with few rows and similar context lengths share one padded call; a long prefill chunk
has its own.  Masks and key indices are built once per step and distinct window, not per layer.
Other backends are tested against this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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

    rows: the batch rows, contiguous.  width: padded rows per share.
    gather: int64[shares * width], for each padded row the batch row it copies; None when no
    padding is needed.  scatter: int64[rows], where each row stands among the padded ones.
    key_slots: int64[shares * num_keys]; None where the keys are the slice `key_slice` of the cache.
    mask: [shares, 1, width, num_keys], 0 or -inf; None where everything, or with `causal`
    everything before the row, is visible.
    """

    rows: slice
    num_shares: int
    width: int
    gather: torch.Tensor | None
    scatter: torch.Tensor | None
    num_keys: int
    key_slice: slice
    key_slots: torch.Tensor | None
    mask: torch.Tensor | None
    causal: bool

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """query [heads, all rows, head_dim] -> [shares, heads, width, head_dim]."""
        own = query[:, self.rows] if self.gather is None else query.index_select(1, self.gather)
        heads, _, head_dim = own.shape
        return own.view(heads, self.num_shares, self.width, head_dim).transpose(0, 1)

    def keys_values(self, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer of the cache -> keys and values, [shares, kv_heads, num_keys, head_dim]."""
        own = kv[self.key_slice] if self.key_slots is None else kv.index_select(0, self.key_slots)
        own = own.view(self.num_shares, self.num_keys, *kv.shape[1:])
        return own[:, :, 0].transpose(1, 2), own[:, :, 1].transpose(1, 2)

    def rows_of(self, output: torch.Tensor) -> torch.Tensor:
        """[shares, heads, width, head_dim] -> [rows, heads, head_dim]."""
        rows = output.transpose(1, 2).flatten(0, 1)
        return rows if self.scatter is None else rows.index_select(0, self.scatter)


class SdpaPlan:
    """One step's groups; tensors are made when a layer first needs them."""

    def __init__(self, batch: Batch, scratch_slot: int) -> None:
        self._grouped = list(_grouped(batch.shares))
        self._num_padding_rows = batch.num_rows - (batch.shares[-1].row_stop if batch.shares else 0)
        self._scratch_slot = scratch_slot
        self._groups: dict[tuple[int | None, torch.device, torch.dtype], list[_Group]] = {}
        self._folded: dict[tuple[int, int], torch.Tensor] = {}

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, window: int | None, options: AttentionOptions
    ) -> torch.Tensor:
        key = (window, kv.device, query.dtype)
        groups = self._groups.get(key)
        if groups is None:
            groups = [
                _build_group(shares, window, self._scratch_slot, query.device, query.dtype)
                for shares in self._grouped
            ]
            self._groups[key] = groups
        parts = [group.rows_of(self._attend_group(group, query, kv, options)) for group in groups]
        if self._num_padding_rows:
            parts.append(query.new_zeros(self._num_padding_rows, query.shape[0], query.shape[2]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_group(
        self, group: _Group, query: torch.Tensor, kv: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """[shares, heads, width, head_dim]"""
        queries = group.queries(query)
        keys, values = group.keys_values(kv)
        shape, kv_heads = queries.shape, keys.shape[1]
        sharing = shape[1] // kv_heads
        if options.softcap is not None or options.sinks is not None:
            return _attend_explicitly(queries, keys, values, group, options)
        fold = sharing > 1 and group.width <= _MAX_FOLDED_ROWS
        if kv_heads == 1 and not fold:  # 128 heads may share one: neither keys nor masks are copied
            keys, values = (each.expand(-1, shape[1], -1, -1) for each in (keys, values))
            sharing = 1
        # CUDA's fast kernels take no grouped heads together with a mask.
        fold = fold or (sharing > 1 and queries.is_cuda)
        if not fold or group.causal:
            return scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=group.mask,
                is_causal=group.causal,
                scale=options.scaling,
                enable_gqa=sharing > 1,
            )
        output = scaled_dot_product_attention(
            queries.reshape(shape[0], kv_heads, sharing * shape[2], shape[3]),
            keys,
            values,
            attn_mask=self._fold_mask(group, sharing),
            scale=options.scaling,
        )
        return output.view(shape)

    def _fold_mask(self, group: _Group, sharing: int) -> torch.Tensor | None:
        """The mask repeated for every query head of a key head."""
        if group.mask is None:
            return None
        key = (id(group), sharing)
        folded = self._folded.get(key)
        if folded is None:
            folded = group.mask.repeat(1, 1, sharing, 1)
            self._folded[key] = folded
        return folded


class SdpaBackend(AttentionBackend):
    """Makes SdpaPlans."""

    name = "sdpa"

    def plan(self, batch: Batch, scratch_slot: int) -> SdpaPlan:
        return SdpaPlan(batch, scratch_slot)


def _attend_explicitly(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: _Group,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention spelled out, for what the fused kernels lack: capped logits and sinks.

    Gemma 2 (softcap on the scores before the mask) and gpt-oss (a sink logit per head).
    """
    sharing = queries.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(sharing, dim=1) for part in (keys, values))
    scores = torch.matmul(queries, keys.transpose(2, 3)) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if group.causal:
        future = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    elif group.mask is not None:
        scores = scores + group.mask
    if options.sinks is not None:
        sinks = options.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks.to(scores.dtype)), dim=-1)
    probs = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(probs[..., : keys.shape[2]], values)


def _grouped(shares: Sequence[Share]) -> Iterator[list[Share]]:
    """Runs of neighbouring shares that one call can serve."""
    group: list[Share] = []
    bucket = -1
    for share in shares:
        own = max(share.key_len, _MIN_BUCKET_KEYS).bit_length()
        if group and (own != bucket or share.num_rows > _MAX_GROUPED_ROWS):
            yield group
            group = []
        group.append(share)
        bucket = -1 if share.num_rows > _MAX_GROUPED_ROWS else own
    if group:
        yield group


def _build_group(
    shares: Sequence[Share],
    window: int | None,
    scratch_slot: int,
    device: torch.device,
    dtype: torch.dtype,
) -> _Group:
    starts = [share.key_start(window) for share in shares]
    key_counts = [share.key_len - start for share, start in zip(shares, starts, strict=True)]
    num_keys, width = max(key_counts), max(share.num_rows for share in shares)
    rows = slice(shares[0].row_start, shares[-1].row_stop)
    gather = scatter = None
    if any(share.num_rows != width for share in shares):
        gather, scatter = _padding_indices(shares, width, device)
    key_slots = np.full((len(shares), num_keys), scratch_slot, dtype=np.int64)
    for row, (share, start, count) in enumerate(zip(shares, starts, key_counts, strict=True)):
        key_slots[row, :count] = share.slots[start:]
    first = int(key_slots[0, 0])
    consecutive = len(shares) == 1 and bool((np.diff(key_slots[0]) == 1).all())
    causal = _is_causal(shares, window)
    return _Group(
        rows=rows,
        num_shares=len(shares),
        width=width,
        gather=gather,
        scatter=scatter,
        num_keys=num_keys,
        key_slice=slice(first, first + num_keys),
        key_slots=None if consecutive else torch.from_numpy(key_slots.ravel()).to(device),
        mask=None if causal else _mask(shares, window, (width, num_keys), device, dtype),
        causal=causal,
    )


def _is_causal(shares: Sequence[Share], window: int | None) -> bool:
    """A prompt's first chunk without nodes: the kernels have their own mask for it."""
    share = shares[0]
    return (
        len(shares) == 1
        and share.num_rows == share.key_len
        and share.num_delta == share.num_rows
        and (window is None or window >= share.key_len)
    )


def _mask(
    shares: Sequence[Share],
    window: int | None,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    visible = np.zeros((len(shares), *shape), dtype=np.bool_)
    for row, share in enumerate(shares):
        own = share.visible(window)
        visible[row, : own.shape[0], : own.shape[1]] = own
        visible[row, own.shape[0] :] = visible[row, 0]  # padding rows are copies of the first
    if visible.all():
        return None
    additive = np.where(visible, np.float32(0), np.float32("-inf"))
    return torch.from_numpy(additive).unsqueeze(1).to(device=device, dtype=dtype)


def _padding_indices(
    shares: Sequence[Share], width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    counts = np.array([share.num_rows for share in shares])
    starts = np.array([share.row_start for share in shares])
    columns = np.arange(width)[None, :]
    real = columns < counts[:, None]
    gather = np.where(real, starts[:, None] + columns, starts[:, None])
    scatter = np.flatnonzero(real)
    return torch.from_numpy(gather.ravel()).to(device), torch.from_numpy(scatter).to(device)
