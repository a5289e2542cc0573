"""Logit bias, penalties, bans and masks: the adjustments that depend on a row's own path.

A row at a tree node counts the tokens of the node's path as output: under any tree its logits are
adjusted as plain decoding would adjust them at the same text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cluster.core import SamplingParams, TokenArray, TokenMask, TokenTree
from cluster.records import record
from cluster.spec.transfer import sent
from cluster.spec.tree import Indices, ancestor_mask

# Float32 can still hold a number of this size after it is multiplied by a count and added to a
# logit.
_MAX_SHIFT = 1e30


@record
class Counts:
    """The token counts of one sequence so far, on the logits' device.

    output: float32[vocab], occurrences among the output tokens.  seen: bool[vocab], True for the
    tokens that occur in the prompt or the output.
    """

    output: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def of(
        cls, prompt: TokenArray, output: TokenArray, vocab_size: int, device: torch.device
    ) -> Counts:
        """Count from the start; `add` keeps up with the text afterwards."""
        counts = cls(
            torch.zeros(vocab_size, dtype=torch.float32, device=device),
            torch.zeros(vocab_size, dtype=torch.bool, device=device),
        )
        counts.seen[sent(prompt.astype(np.int64), device)] = True
        counts.add(output)
        return counts

    def add(self, token_ids: TokenArray) -> None:
        """Count further output tokens."""
        ids = sent(token_ids.astype(np.int64), self.output.device)
        # Whole numbers in float32: the order of additions cannot matter.
        self.output.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))
        self.seen[ids] = True


@record
class PenalisedRows:
    """The rows of one sequence from `start` on: row 0 after its context, row i + 1 after node i."""

    start: int
    counts: Counts
    params: SamplingParams
    tree: TokenTree


def single_precision_penalties(params: SamplingParams) -> tuple[float, float, float]:
    """Return repetition, frequency and presence penalty, bounded to keep float32 logits finite.

    At these bounds the penalties already outweigh all logits, so greater ones have no more effect.
    """
    return (
        min(max(params.repetition_penalty, 1.0 / _MAX_SHIFT), _MAX_SHIFT),
        bounded(params.frequency_penalty),
        bounded(params.presence_penalty),
    )


def bounded(shift: float) -> float:
    """Bound a number that is added to logits, so that they stay finite in float32."""
    return min(max(shift, -_MAX_SHIFT), _MAX_SHIFT)


def penalise(logits: torch.Tensor, sequences: Sequence[PenalisedRows]) -> None:
    """Apply repetition, frequency and presence penalties to logits float32[rows, vocab], in place.

    Repetition (Keskar et al. 2019, as Hugging Face and vLLM): positive logits of seen tokens are
    divided by it, others multiplied.  Then output counts times frequency and, where above zero,
    presence are taken off.
    """
    sizes = [len(sequence.tree) + 1 for sequence in sequences]
    owners = sent(np.repeat(np.arange(len(sequences)), sizes), logits.device)
    starts = np.repeat([s.start for s in sequences], sizes)
    offsets = np.concatenate([np.arange(size) for size in sizes])
    rows = sent(starts + offsets, logits.device)
    output = torch.stack([s.counts.output for s in sequences])[owners]  # [rows, vocab]
    seen = torch.stack([s.counts.seen for s in sequences])[owners]  # [rows, vocab]
    path_rows, path_tokens = sent(_path_pairs(sequences, sizes), logits.device)
    output.index_put_((path_rows, path_tokens), output.new_ones(len(path_rows)), accumulate=True)
    seen[path_rows, path_tokens] = True
    factors = sent(
        np.array([single_precision_penalties(each.params) for each in sequences], np.float32),
        logits.device,
    )[owners]  # [rows, 3]
    repetition, frequency, presence = factors.unsqueeze(2).unbind(1)  # each [rows, 1]
    values = logits[rows]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(seen, repeated, values)
    values -= frequency * output
    values -= presence * (output > 0)
    logits[rows] = values


def _path_pairs(sequences: Sequence[PenalisedRows], sizes: Sequence[int]) -> Indices:
    """Return (row, token) for every row and every token on its path, int64[2, pairs]; rows of all
    `sequences` are numbered together."""
    found, base = [np.empty((2, 0), dtype=np.int64)], 1
    for sequence, size in zip(sequences, sizes, strict=True):
        rows, nodes = np.nonzero(ancestor_mask(sequence.tree.parents))
        found.append(np.stack((base + rows, sequence.tree.token_ids[nodes])))
        base += size
    return np.concatenate(found, axis=1)


@record
class TokenBias:
    """Numbers to add to the logits of some tokens; ids int64[k] without repeats, on device."""

    token_ids: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, float]], device: torch.device) -> TokenBias:
        """Return the bias of these (token, number) pairs; a token named twice gets the sum."""
        sums: dict[int, float] = {}
        for token, value in pairs:
            sums[token] = sums.get(token, 0.0) + value
        return cls(
            sent(np.array(list(sums), np.int64), device),
            sent(np.array(list(map(bounded, sums.values())), np.float32), device),
        )

    def apply(self, logits: torch.Tensor) -> None:
        """Add to every row of float32[rows, vocab], in place."""
        logits.index_add_(1, self.token_ids, self.values.expand(len(logits), -1))


def ban(logits: torch.Tensor, rows: Indices, token_ids: torch.Tensor) -> None:
    """Make `token_ids` (int64[k]) impossible at the given rows, in place."""
    logits[sent(rows, logits.device).unsqueeze(1), token_ids] = -torch.inf


def forbid(logits: torch.Tensor, masks: TokenMask, *, may_be_banned: bool) -> None:
    """Make the tokens that `masks` does not allow impossible, in place.

    logits: float32[rows, vocab].  may_be_banned: some tokens may be impossible already.  If a mask
    allows only such tokens, the mask wins: a text may end by its grammar before min_tokens.
    """
    forbidden = clear_bits(masks, logits)
    logits.masked_fill_(forbidden, -torch.inf)
    if may_be_banned:
        dead = (logits.amax(dim=1) == -torch.inf).unsqueeze(1)
        logits.masked_fill_(dead & ~forbidden, 0.0)


def clear_bits(masks: TokenMask, logits: torch.Tensor) -> torch.Tensor:
    """Return the tokens whose bits are clear: bool[rows, vocab] on the logits' device."""
    words = sent(masks.view(np.int32), logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (words.unsqueeze(2) >> shifts) & 1  # [rows, words, 32]
    return allowed.flatten(1)[:, : logits.shape[1]] == 0
