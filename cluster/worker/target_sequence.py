"""The sampling state of each text at the target, and the draws from the rows of a step."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cluster.core import EMPTY_TOKENS, EMPTY_TREE, TokenArray, TokenTree, token_array
from cluster.engine.beam_search import BeamRun
from cluster.engine.draw.native import DrawKernels, DrawShare
from cluster.errors import RequestError, WorkerError
from cluster.requests.redraw import Redraw
from cluster.spec.draw import DrawRows, FusedDraw, Indices, draw, winner_among
from cluster.spec.gap import gap_of
from cluster.spec.logits_hook import LogitsHook, TokenMask, forbid
from cluster.spec.noise_torch import NoiseRows
from cluster.spec.penalties import Counts, PenalisedRows, TokenBias, ban, penalise
from cluster.spec.sampling import is_truncated, pack
from cluster.spec.tree import depths
from cluster.worker.texts import TargetText


class TargetSequence:
    """The sampling state of one text, and its work in the engine.

    is_pending: the engine has not answered its work yet.  tree: the nodes of that work, which are
    those that the hook allows.  kept: their places in the tree that was submitted, None = all.
    search: the beam search, if the text is one.  redraws: of an audit, in the present step.
    """

    def __init__(
        self,
        text: TargetText,
        vocab_size: int,
        device: torch.device,
        hook: LogitsHook | None = None,
        adapter: int = 0,
    ) -> None:
        """adapter: as in `Work`."""
        params = text.params
        self.text = text
        self.params = params
        self.seed = params.noise_key
        self.packed = pack(params)
        self.truncated = is_truncated(params)
        self.is_pending = False
        self.tree = EMPTY_TREE
        self.kept: TokenArray | None = None
        self.search: BeamRun | None = None
        self.hook = hook
        self.failure: RequestError | None = None  # raised by the hook; the request ends with it
        self.adapter = adapter
        self.redraws: tuple[Redraw, ...] = ()
        self.bias = TokenBias.of(params.logit_bias, device) if params.logit_bias else None
        stops = [token for token in params.stop_token_ids if 0 <= token < vocab_size]
        self.banned = (
            torch.tensor(stops, dtype=torch.int64, device=device)
            if stops and params.min_tokens > 0
            else None
        )
        self._vocab_size = vocab_size
        self._device = device
        self._counts: Counts | None = None
        self._num_counted = 0  # tokens of the text in _counts
        self._num_hooked = text.opened.prompt_len  # tokens of the text that the hook knows

    def begin(self, tree: TokenTree) -> None:
        """Begin a step of the text: the nodes that its hook allows become its `tree`."""
        self.tree, self.kept = tree, None
        if self.hook is None:
            return
        tokens = self.text.tokens
        self.hook.extend(tokens.since(self._num_hooked))
        self._num_hooked = len(tokens)
        nodes = self.hook.prepare(tree)
        if nodes is None or len(nodes) == len(tree):
            return
        self.kept = kept = token_array(nodes)
        places = np.full(len(tree) + 1, -1, dtype=np.int32)  # the last one is the root's
        places[kept] = np.arange(len(kept), dtype=np.int32)
        self.tree = TokenTree(tree.token_ids[kept], places[tree.parents[kept]])

    @property
    def counts(self) -> Counts:
        """Occurrences in the text so far."""
        tokens = self.text.tokens
        if self._counts is None:
            prompt, output = np.split(tokens.token_ids, [self.text.opened.prompt_len])
            self._counts = Counts.of(prompt, output, self._vocab_size, self._device)
        elif self._num_counted < len(tokens):
            self._counts.add(tokens.since(self._num_counted))
        self._num_counted = len(tokens)
        return self._counts


@dataclass(slots=True, eq=False)
class Evaluated:
    """A sequence whose tree was evaluated: logits float32[n + 1, vocab], the root's row first.

    start: its first row among those of the batch.  mask: the tokens that its hook allows at each of
    its rows; None = all tokens, or the request has failed and its draws are not used.
    """

    sequence: TargetSequence
    logits: torch.Tensor
    start: int = 0
    mask: TokenMask | None = None

    @property
    def tree(self) -> TokenTree:
        return self.sequence.tree

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + len(self.logits))

    @property
    def positions(self) -> Indices:
        """Output position of the draw at each row."""
        positions = np.zeros(len(self.tree) + 1, dtype=np.int64)
        positions[1:] = depths(self.tree.parents)
        return positions + self.sequence.text.output_len

    def ask_hook(self) -> None:
        """Take the mask from the sequence's hook."""
        try:
            self.mask = None if self.sequence.hook is None else self.sequence.hook.masks()
        except RequestError as error:
            self.sequence.failure = error


def draw_all(
    batch: Sequence[Evaluated],
    noise: NoiseRows,
    native: DrawKernels | None = None,
    fused: FusedDraw | None = None,
) -> list[TokenArray | None]:
    """Return the target's draws of each entry, int32[n + 1]; -1 for a row without a valid law.

    None: the entry's law of acceptance draws nothing beforehand (`cluster.worker.ratio_walk`).

    native: faster draws for logits on the CPU; fused: for logits on a GPU.  The draws are the same
    without them.  If a sequence's output is given, its tokens replace the draws.
    """
    start = 0
    coupled = [entry for entry in batch if entry.sequence.params.is_coupled]
    for entry in coupled:
        entry.start, start = start, start + len(entry.logits)
        entry.ask_hook()
    token_ids = _draw_all(coupled, noise, native, fused) if coupled else EMPTY_TOKENS
    return [
        _forced(entry, token_ids[entry.rows]) if entry.sequence.params.is_coupled else None
        for entry in batch
    ]


def _forced(entry: Evaluated, draws: TokenArray) -> TokenArray:
    given = entry.sequence.text.forced
    if not len(given):
        return draws
    positions = entry.positions
    # A row without a valid law has no log-probabilities either, so it fails as in other sequences.
    rows = np.flatnonzero((positions < len(given)) & (draws >= 0))
    wanted = given[positions[rows]]
    if entry.sequence.text.opened.is_audit:
        entry.sequence.redraws = _redraws(entry, rows[draws[rows] != wanted], draws)
    draws[rows] = wanted
    return draws


def _redraws(entry: Evaluated, rows: Indices, draws: TokenArray) -> tuple[Redraw, ...]:
    """Return what is drawn at rows whose given token is another one."""
    if not len(rows):
        return ()
    sequence, given = entry.sequence, entry.sequence.text.forced
    logits, params, found = adjusted(entry), sequence.params, []
    for row, position in zip(rows.tolist(), entry.positions[rows].tolist(), strict=True):
        drawn = int(draws[row])
        triple = (sequence.seed, position, params.stream)
        gap = gap_of(logits[row], drawn, int(given[position]), params, triple)
        found.append(Redraw(position, drawn, gap))
    return tuple(found)


def _draw_all(
    batch: Sequence[Evaluated],
    noise: NoiseRows,
    native: DrawKernels | None,
    fused: FusedDraw | None,
) -> TokenArray:
    is_adjusted = any(_is_adjusted(entry.sequence) for entry in batch)
    if any(e.sequence.truncated and e.sequence.params.temperature > 0.0 for e in batch):
        native = None
    if native is not None and not is_adjusted:
        return _draw_natively(batch, native)
    logits = batch[0].logits if len(batch) == 1 else torch.cat([e.logits for e in batch])
    if is_adjusted or any(entry.mask is not None for entry in batch):
        # The engine's tensors stay as they are: log-probabilities are those of the raw law.
        logits = logits.clone() if len(batch) == 1 else logits
        _adjust(logits, batch)
    if native is not None:
        adjusted = [Evaluated(e.sequence, logits[e.rows], e.start) for e in batch]
        return _draw_natively(adjusted, native)
    draws = draw(logits, _draw_rows(batch), noise, fused)
    return np.where(draws.valid, draws.token_ids, np.int32(-1))


def adjusted(entry: Evaluated) -> torch.Tensor:
    """Return an entry's logits after bias, penalties, bans and the mask of its hook."""
    entry.ask_hook()
    if entry.mask is None and not _is_adjusted(entry.sequence):
        return entry.logits
    logits = entry.logits.clone()
    _adjust(logits, [entry])
    return logits


def no_law(num_tokens: int) -> WorkerError:
    """Return the error of a row of logits after so many tokens that nothing can be drawn from."""
    return WorkerError(
        f"the target's logits after {num_tokens} tokens have no finite maximum; the model or its "
        "dtype overflows, or everything is banned"
    )


def _draw_natively(batch: Sequence[Evaluated], native: DrawKernels) -> TokenArray:
    """Draw at all rows; no law may truncate."""
    rows = [entry.logits.contiguous() for entry in batch]
    shares = [
        DrawShare(
            row.data_ptr(),
            entry.tree.parents.tobytes(),
            len(entry.tree) + 1,
            entry.sequence.seed,
            entry.sequence.text.output_len,
            entry.sequence.params.stream,
            entry.sequence.params.temperature,
            None if entry.mask is None else entry.mask.ctypes.data,
        )
        for entry, row in zip(batch, rows, strict=True)
    ]
    winners = native.draw(shares, rows[0].shape[1])
    for row, candidates in winners.close:
        index = bisect.bisect_right(batch, row, key=operator.attrgetter("start")) - 1
        entry = batch[index]
        inner, params = row - entry.start, entry.sequence.params
        among = _allowed(entry, inner) if candidates is None else candidates
        triple = (entry.sequence.seed, int(entry.positions[inner]), params.stream)
        winners.token_ids[row] = winner_among(rows[index][inner], among, params.temperature, triple)
    return winners.token_ids


def _allowed(entry: Evaluated, row: int) -> Indices:
    """The tokens that may be drawn at a row of an entry, ascending."""
    vocab_size = entry.logits.shape[1]
    if entry.mask is None:
        return np.arange(vocab_size)
    bits = np.unpackbits(entry.mask[row].view(np.uint8), count=vocab_size, bitorder="little")
    return np.flatnonzero(bits)


def _draw_rows(batch: Sequence[Evaluated]) -> DrawRows | None:
    """Return the inputs of the rows' draws; None if all are greedy."""
    sequences = [entry.sequence for entry in batch]
    if all(sequence.params.temperature == 0.0 for sequence in sequences):
        return None
    sizes = [len(entry.logits) for entry in batch]
    return DrawRows(
        packed=np.repeat(np.array([s.packed for s in sequences]), sizes, axis=0),
        truncated=np.repeat(np.array([s.truncated for s in sequences]), sizes),
        seeds=np.repeat(np.array([s.seed for s in sequences], dtype=np.uint64), sizes),
        positions=np.concatenate([entry.positions for entry in batch]),
        streams=np.repeat(np.array([s.params.stream for s in sequences]), sizes),
    )


def _is_adjusted(sequence: TargetSequence) -> bool:
    return (
        sequence.params.has_penalties
        or sequence.bias is not None
        or (sequence.banned is not None and sequence.text.output_len < sequence.params.min_tokens)
    )


def _adjust(logits: torch.Tensor, batch: Sequence[Evaluated]) -> None:
    """Bias, penalties, bans and masks, in place and in the order `cluster.spec.sampling` states."""
    for entry in batch:
        if entry.sequence.bias is not None:
            entry.sequence.bias.apply(logits[entry.rows])
    penalised = [
        PenalisedRows(
            entry.start, entry.rows.stop, entry.sequence.counts, entry.sequence.params, entry.tree
        )
        for entry in batch
        if entry.sequence.params.has_penalties
    ]
    if penalised:
        penalise(logits, penalised)
    for entry in batch:
        banned = entry.sequence.banned
        if banned is not None:
            early = np.flatnonzero(entry.positions < entry.sequence.params.min_tokens)
            ban(logits, (early + entry.start).tolist(), banned)
        if entry.mask is not None:
            forbid(logits[entry.rows], entry.mask, may_be_banned=banned is not None)
