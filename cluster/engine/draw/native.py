"""Draws over the vocabulary as native calls: the target's, and what drafters make of theirs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cluster.cpp import Signatures, declared
from cluster.records import record
from cluster.spec.logprobs import TopTokens

# How far below the best approximate score the winner of a draw may stand: the noise of the kernel
# is right to 1e-5 and scores of candidates that may win are below 64, so this is plenty.
_FINALIST_MARGIN = 1e-3
_MAX_FINALISTS = 16
# Numbers of noise that are worth a thread.
_NOISE_PER_THREAD = 64 * 1024

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES: Signatures = {
    "draw_tokens": (ctypes.c_int64, _POINTER, _LONG, _LONG, _FLOAT, _LONG, *[_POINTER] * 3, _INT),
    "rank_tokens": (None, _POINTER, *[_LONG] * 4, *[_POINTER] * 4, _INT),
    "max_ranked": (_LONG,),
}


def fields(kind: type[Any], *names: str) -> list[tuple[str, type[Any]]]:
    """Neighbouring fields of one type, as a structure of ctypes lists them."""
    return [(name, kind) for name in names]


Integers = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


class RankedDraw(ctypes.Structure):
    """operations.h's: what the target's draw at a row depends on, besides the logits.

    temperature 0 = greedy; top_k 0, top_p 1, min_p 0 = every token may be drawn.  target_ids: the
    address of int32[columns], the target's id of each column of the logits; None = the column.
    """

    _fields_ = (
        ("seed", ctypes.c_uint64),
        *fields(ctypes.c_int64, "position", "stream", "top_k"),
        *fields(ctypes.c_double, "temperature", "top_p", "min_p"),
        ("target_ids", _POINTER),
    )


_GREEDY = RankedDraw(0, 0, 0, 0, 0.0, 1.0, 0.0, None)


class DrawShare(ctypes.Structure):
    """operations.h's: rows of logits and what the target's draws at them depend on.

    logits: float32[num_rows, vocab], contiguous.  parents: int32[num_rows - 1], as bytes, of the
    nodes behind the first row.  position: of the first row's draw.  temperature 0 = greedy.
    allowed: uint32[num_rows, ceil(vocab / 32)], contiguous, a bit for each token that may be drawn;
    None = all.
    """

    _fields_ = (
        ("logits", _POINTER),
        ("parents", ctypes.c_char_p),
        ("num_rows", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        *fields(ctypes.c_int64, "position", "stream"),
        ("temperature", ctypes.c_double),
        ("allowed", _POINTER),
    )


@record
class Winners:
    """Draws, up to near-ties.

    token_ids: int32[rows], -1 where a row's logits have no finite maximum.  close: rows where more
    than one token comes into question, each with their ids, ascending; None = with too many.
    """

    token_ids: npt.NDArray[np.int32]
    close: list[tuple[int, Integers | None]]


class DrawKernels:
    """The compiled functions.  num_threads: that one call may use.

    Draws are told apart by seed, position and stream, as in `cluster.spec.noise`: one of each for
    every row.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.num_threads = 1
        self.library = declared(library, _SIGNATURES)
        self.max_ranked: int = library.max_ranked()

    def draw(self, shares: Sequence[DrawShare], vocab_size: int) -> Winners:
        """The draw at every row of `shares`, whose laws truncate nothing."""
        num_rows = sum(share.num_rows for share in shares)
        # Not NumPy's: that takes longer to tell an array's address than such a draw lasts.
        token_ids = (ctypes.c_int32 * num_rows)()
        finalists = (ctypes.c_int64 * (num_rows * _MAX_FINALISTS))()
        counts = (ctypes.c_int64 * num_rows)()
        num_sampled = sum(share.num_rows for share in shares if share.temperature > 0.0)
        # Waking the other threads takes as long as some rows.
        num_threads = 1 + num_sampled * vocab_size // _NOISE_PER_THREAD
        most = self.library.draw_tokens(
            (DrawShare * len(shares))(*shares),
            len(shares),
            vocab_size,
            _FINALIST_MARGIN,
            _MAX_FINALISTS,
            token_ids,
            finalists,
            counts,
            min(num_threads, self.num_threads),
        )
        close: list[tuple[int, Integers | None]] = []
        if most > 1:
            found = np.frombuffer(finalists, dtype=np.int64).reshape(num_rows, _MAX_FINALISTS)
            for row, count in enumerate(counts):
                if count > 1:
                    close.append((row, found[row, :count] if count <= _MAX_FINALISTS else None))
        return Winners(np.frombuffer(token_ids, dtype=np.int32), close)

    def rank(
        self,
        logits: torch.Tensor,
        count: int,
        draws: Sequence[RankedDraw],
        totals: Doubles | None = None,
    ) -> tuple[Integers, Doubles]:
        """Each row's `count` most probable tokens, ordered by score: (token ids, scores), [rows,
        count].

        logits: float32[rows, vocab], a row's contiguous.  draws: one for each row.  count: at most
        `max_ranked` and the vocabulary's size.  totals: float64[rows], is given the logarithm of
        each row's sum of exponentials.
        scores: logits over temperature plus noise to 1e-5, -inf where the truncation leaves no
        candidate; greedy: logits.
        """
        num_rows, vocab_size = logits.shape
        token_ids = np.empty((num_rows, count), dtype=np.int64)
        scores = np.empty((num_rows, count))
        self.library.rank_tokens(
            logits.data_ptr(),
            logits.stride(0),
            num_rows,
            vocab_size,
            count,
            (RankedDraw * num_rows)(*draws),
            token_ids.ctypes.data,
            scores.ctypes.data,
            None if totals is None else totals.ctypes.data,
            self.num_threads,
        )
        return token_ids, scores

    def top(self, logits: torch.Tensor, num_top: int) -> TopTokens:
        """`cluster.spec.logprobs.top_tokens` for num_top up to `max_ranked`.

        logits: float32[rows, vocab], a row's contiguous.
        """
        count, totals = min(num_top, logits.shape[1]), np.empty(len(logits))
        token_ids, scores = self.rank(logits, count, [_GREEDY] * len(logits), totals)
        return TopTokens(token_ids.astype(np.int32), (scores - totals[:, None]).astype(np.float32))
