"""The draws of the texts of a step, from the rows of logits that it gave each of them."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Sequence

import numpy as np
import torch

from cluster.core import TokenArray, TokenMask
from cluster.engine.draw.native import DrawKernels, DrawShare
from cluster.engine.draw.sampled_text import SampledText
from cluster.errors import WorkerError
from cluster.requests.fields import NO_LAWS, Laws, Redraw
from cluster.spec.draw import (
    ROWS_AT_ONCE,
    DrawRows,
    Draws,
    FusedDraw,
    begin_draw,
    gap_of,
    winner_among,
)
from cluster.spec.penalties import (
    PenalisedRows,
    ban,
    forbid,
    penalise,
)
from cluster.spec.rejection import walk_in_turn
from cluster.spec.sampling import RowLaws, scale, survivors
from cluster.spec.tree import Floats, Indices

_NO_DRAWS = Draws(torch.empty(0, dtype=torch.int32))


class BatchDraws:
    """The target's draws of each sequence of a step; the first ones are under way at once.

    token_ids: int32[rows] of these, on the logits' device; see `Draws`, and `SampledText.start`.
    """

    def __init__(
        self,
        batch: Sequence[SampledText],
        native: DrawKernels | None = None,
        fused: FusedDraw | None = None,
    ) -> None:
        """native: faster draws for logits on the CPU; fused: for logits on a GPU.  The draws are
        the same without them."""
        self._native, self._fused = native, fused
        rows = np.cumsum([each.num_rows for each in batch])
        count = max(int((rows <= ROWS_AT_ONCE).sum()), 1)
        self._batch, self._others = batch[:count], batch[count:]
        start = 0
        coupled = [each for each in self._batch if each.params.is_coupled]
        for each in coupled:
            each.start, start = start, start + each.num_rows
            each.ask_hook()
        self._draws = _draw_all(coupled, native, fused) if coupled else _NO_DRAWS
        self.token_ids = self._draws.token_ids

    @property
    def on_device(self) -> TokenArray:
        """`token_ids` on the host, once the device has drawn them."""
        return self._draws.on_device

    def taken(self) -> list[TokenArray | None]:
        """Return int32[n + 1] of each sequence, -1 for a row without a valid law; None: its law of
        acceptance draws nothing beforehand.

        If a sequence's output is given, its tokens replace the draws."""
        token_ids = self._draws.taken()
        found = [
            _forced(each, token_ids[each.rows]) if each.params.is_coupled else None
            for each in self._batch
        ]
        if self._others:
            found += BatchDraws(self._others, self._native, self._fused).taken()
        return found


def _forced(text: SampledText, draws: TokenArray) -> TokenArray:
    given = text.forced
    if not len(given):
        return draws
    positions = text.positions
    # A row without a valid law has no log-probabilities either, so it fails as in other sequences.
    rows = np.flatnonzero((positions < len(given)) & (draws >= 0))
    wanted = given[positions[rows]]
    if text.is_audit:
        text.redraws = _redraws(text, rows[draws[rows] != wanted], draws)
    draws[rows] = wanted
    return draws


def _redraws(text: SampledText, rows: Indices, draws: TokenArray) -> tuple[Redraw, ...]:
    """Return what is drawn at rows whose given token is another one."""
    if not len(rows):
        return ()
    given, params, found = text.forced, text.params, []
    logits = adjusted(text)
    for row, position in zip(rows.tolist(), text.positions[rows].tolist(), strict=True):
        drawn = int(draws[row])
        triple = (text.seed, position, params.stream)
        gap = gap_of(logits[row], drawn, int(given[position]), params, triple)
        found.append(Redraw(position, drawn, gap))
    return tuple(found)


def _draw_all(
    batch: Sequence[SampledText],
    native: DrawKernels | None,
    fused: FusedDraw | None,
) -> Draws:
    is_adjusted = any(each.is_adjusted for each in batch)
    if any(each.params.is_truncated for each in batch):
        native = None
    own = [each.logits for each in batch]
    if native is not None and not is_adjusted:
        return _draw_natively(batch, own, native)
    is_adjusted |= any(each.mask is not None for each in batch)
    # The engine's tensors stay as they are: log-probabilities are those of the raw law.
    logits = torch.cat(own) if is_adjusted or len(own) > 1 else own[0]
    if is_adjusted:
        _adjust(logits, batch)
    if native is not None:
        return _draw_natively(batch, [logits[each.rows] for each in batch], native)
    rows = None
    if any(each.params.temperature > 0.0 for each in batch):
        rows = DrawRows.of([each.params for each in batch], [each.positions for each in batch])
    return begin_draw(logits, rows, fused)


def adjusted(text: SampledText) -> torch.Tensor:
    """Return a sequence's logits after bias, penalties, bans and the mask of its hook."""
    text.ask_hook()
    if text.mask is None and not text.is_adjusted:
        return text.logits
    logits, text.start = text.logits.clone(), 0
    _adjust(logits, [text])
    return logits


def no_law(num_tokens: int) -> WorkerError:
    """Return the error of a row of logits after so many tokens that nothing can be drawn from."""
    return WorkerError(
        f"the target's logits after {num_tokens} tokens have no finite maximum; the model or its "
        "dtype overflows, or everything is banned"
    )


def walk_by_ratio(text: SampledText, drawn: Laws) -> tuple[TokenArray, TokenArray]:
    """Accept the drafts of one text by the textbook's laws; returns (path, token_ids) as
    `cluster.spec.tree.walk_draws` does.

    drawn: the laws that its nodes were drawn from.  Only the rows that the walk comes to are made
    probabilities.  Raises WorkerError for broken logits, and what the text's own hook raises.
    """
    logits = adjusted(text)
    if text.failure is not None:
        raise text.failure
    params = text.params
    laws = RowLaws.of([params], logits.device)
    temperature = np.float32(laws.temperature.item())

    def law_of(node: int) -> Floats:
        row = logits[node + 1 : node + 2]  # [1, vocab]
        if params.is_truncated:
            scaled = scale(row, row.amax(dim=1), laws.temperature)
            cutoffs = survivors(scaled, laws).cutoffs
            row = row.masked_fill(scaled < cutoffs.unsqueeze(1), -torch.inf)
        # One row is too little for several threads to share: waiting for each other they take
        # longer than numpy does alone.
        values = row[0].cpu().numpy()
        maximum = values.max()
        if not np.isfinite(maximum):
            raise no_law(len(text.tokens))
        weights = np.exp((values - maximum) / temperature)
        return np.asarray(weights / weights.sum(dtype=np.float64), dtype=np.float64)

    # A grammar cuts nodes off by what they are, so they all count as chosen, cut off or not.
    drawn = drawn if text.hook is None else NO_LAWS
    return walk_in_turn(text.tree, drawn, law_of, (text.seed, params.stream, text.output_len))


def _draw_natively(
    batch: Sequence[SampledText], logits: Sequence[torch.Tensor], native: DrawKernels
) -> Draws:
    """Draw at all rows, by the masks; no law may truncate.  logits: of each text."""
    rows = [each.contiguous() for each in logits]
    shares = [
        DrawShare(
            row.data_ptr(),
            each.tree.parents.tobytes(),
            each.num_rows,
            each.seed,
            each.output_len,
            each.params.stream,
            each.params.temperature,
            None if each.mask is None else each.mask.ctypes.data,
        )
        for each, row in zip(batch, rows, strict=True)
    ]
    winners = native.draw(shares, rows[0].shape[1])
    for row, candidates in winners.close:
        index = bisect.bisect_right(batch, row, key=operator.attrgetter("start")) - 1
        text = batch[index]
        inner, params, values = row - text.start, text.params, rows[index]
        if candidates is None:
            candidates = _allowed(text.mask, inner, values.shape[1])
        triple = (text.seed, int(text.positions[inner]), params.stream)
        winners.token_ids[row] = winner_among(values[inner], candidates, params.temperature, triple)
    return Draws(torch.from_numpy(winners.token_ids))


def _allowed(mask: TokenMask | None, row: int, vocab_size: int) -> Indices:
    """The tokens that may be drawn at a row of a sequence, ascending."""
    if mask is None:
        return np.arange(vocab_size)
    bits = np.unpackbits(mask[row].view(np.uint8), count=vocab_size, bitorder="little")
    return np.flatnonzero(bits)


def _adjust(logits: torch.Tensor, batch: Sequence[SampledText]) -> None:
    """Bias, penalties, bans and masks, in place and in the order `cluster.spec.sampling` states."""
    for each in batch:
        if each.bias is not None:
            each.bias.apply(logits[each.rows])
    penalised = [
        PenalisedRows(each.start, each.counts, each.params, each.tree)
        for each in batch
        if each.params.has_penalties
    ]
    if penalised:
        penalise(logits, penalised)
    for each in batch:
        if each.banned is not None:
            early = np.flatnonzero(each.positions < each.params.min_tokens)
            ban(logits, early + each.start, each.banned)
        if each.mask is not None:
            forbid(logits[each.rows], each.mask, may_be_banned=each.banned is not None)
