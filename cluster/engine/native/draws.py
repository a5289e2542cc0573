"""Draws over the vocabulary as native calls: the target's, and what drafters make of theirs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

# How far below the best approximate score the winner of a draw may stand: the noise of the kernel
# is right to 1e-5 and scores of candidates that may win are below 64, so this is plenty.
_FINALIST_MARGIN = 1e-3
_MAX_FINALISTS = 16

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float

Seeds = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


class RankedDraw(ctypes.Structure):
    """operations.h's: what the target's draw at a row depends on, besides the logits.

    temperature 0 = greedy; top_k 0, top_p 1, min_p 0 = every token may be drawn.
    """

    _fields_ = (
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("position", "stream", "top_k")),
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p")),
    )


class DrawKernels:
    """The compiled functions.  num_threads: that one call may use.

    Draws are told apart by seed, position and stream, as in `cluster.spec.noise`: one of each for
    every row.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.num_threads = 1
        library.draw_finalists.argtypes = [
            *[_POINTER] * 6, _LONG, _LONG, _FLOAT, _LONG, *[_POINTER] * 3, _INT,
        ]  # fmt: skip
        library.draw_finalists.restype = None
        library.gumbel_tokens.argtypes = [*[_POINTER] * 4, _LONG, _LONG, _POINTER]
        library.gumbel_tokens.restype = None
        library.rank_tokens.argtypes = [_POINTER, *[_LONG] * 4, *[_POINTER] * 4, _INT]
        library.rank_tokens.restype = None
        library.max_ranked.restype = _LONG
        self._draw_finalists = library.draw_finalists
        self._gumbel_tokens = library.gumbel_tokens
        self._rank_tokens = library.rank_tokens
        self.max_ranked: int = library.max_ranked()

    def finalists(
        self,
        logits: torch.Tensor,
        maxima: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: Seeds,
        positions: Integers,
        streams: Integers,
    ) -> tuple[Integers, Integers]:
        """See `cluster.spec.draw.FinalistSearch`."""
        num_rows, vocab_size = logits.shape
        finalists = np.empty((num_rows, _MAX_FINALISTS), dtype=np.int64)
        counts = np.empty(num_rows, dtype=np.int64)
        scores = torch.empty((num_rows, vocab_size))
        keys = [np.ascontiguousarray(each) for each in (seeds, positions, streams)]
        self._draw_finalists(
            logits.data_ptr(), maxima.data_ptr(), temperatures.data_ptr(),
            *(each.ctypes.data for each in keys), num_rows, vocab_size,
            _FINALIST_MARGIN, _MAX_FINALISTS, scores.data_ptr(),
            finalists.ctypes.data, counts.ctypes.data, self.num_threads,
        )  # fmt: skip
        return finalists, counts

    def gumbel(
        self, seeds: Seeds, positions: Integers, token_ids: Integers, streams: Integers
    ) -> npt.NDArray[np.float32]:
        """`cluster.spec.noise.gumbel` to 1e-5: float32[rows, m] for token_ids [rows, m], all others
        [rows]."""
        keys = [np.ascontiguousarray(each) for each in (seeds, positions, streams, token_ids)]
        noise = np.empty(token_ids.shape, dtype=np.float32)
        self._gumbel_tokens(
            *(each.ctypes.data for each in keys), *token_ids.shape, noise.ctypes.data
        )
        return noise

    def rank(
        self, logits: torch.Tensor, count: int, draws: Sequence[RankedDraw]
    ) -> tuple[Integers, Doubles, Doubles]:
        """Each row's `count` most probable tokens, ordered by score: (token ids, scores,
        log-probabilities), [rows, count].

        logits: float32[rows, vocab], a row's contiguous.  draws: one for each row.
        scores: logits over temperature plus noise to 1e-5, -inf where the truncation leaves no
        candidate; greedy: logits.  log-probabilities: at temperature 1.  count: at most
        `max_ranked` and the vocabulary's size.
        """
        num_rows, vocab_size = logits.shape
        token_ids = np.empty((num_rows, count), dtype=np.int64)
        scores, log_probs = np.empty((num_rows, count)), np.empty((num_rows, count))
        self._rank_tokens(
            logits.data_ptr(), logits.stride(0), num_rows, vocab_size, count,
            (RankedDraw * num_rows)(*draws),
            token_ids.ctypes.data, scores.ctypes.data, log_probs.ctypes.data, self.num_threads,
        )  # fmt: skip
        return token_ids, scores, log_probs
