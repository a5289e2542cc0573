"""How long an engine's steps take by their number of rows, before anyone is served.

A coordinator that knows the shape of this staircase need not find it out at the cost of requests:
which numbers of draft nodes are nearly free depends on the machine's kernels alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from cluster.core import TokenArray, TokenTree
from cluster.engine.loading.self_check import all_over
from cluster.engine.work import Steps, Work, run_alone
from cluster.spec.step_profile import StepProfile
from cluster.spec.transfer import received

# From coarse to fine: of a slow model the first ones must do.  The fine ones are neighbours of the
# multiples at which kernels' staircases have their edges.
_ROWS = (1, 32, 8, 64, 16, 24, 12, 48, 4, 20, 28, 40, 2, 6, 10)
# On a CPU one step of these takes longer than all steps of a few rows, and the last two are for
# GPUs, whose graphs go as far.
_MANY_ROWS = (128, 256, 96, 80, 160, 192, 512, 384)
_MOST_ROWS = max(_MANY_ROWS)
MOST_ON_CPU = 256
_CONTEXT_LEN = 16
# Turns, because other processes start meanwhile: that falls on all numbers of rows alike, and the
# fastest of a number's steps counts.  One step alone was seen to take half as long again.
_TURNS = (_ROWS, _ROWS, _MANY_ROWS, _ROWS, _MANY_ROWS, _ROWS)
_WARM_UP_S = 1.0
_MAX_S = 2.0
_REQUEST = "step-profile"


def profile_steps(
    engine: Steps,
    max_rows: int,
    clock: Callable[[], float] = time.perf_counter,
) -> StepProfile | None:
    """The fastest verification step of one sequence by its rows, up to `max_rows`; None where that
    cannot be measured.  It takes three seconds at most, of a slow model four steps."""
    # Which differ, so that rows of a mixture of experts go to as many as a text's do.
    tokens = all_over(engine, _CONTEXT_LEN + _MOST_ROWS)
    best: dict[int, float] = {}
    try:
        if not _runs(engine, Work(_REQUEST, 0, tokens[:_CONTEXT_LEN])):
            return None
        deadline = clock() + _WARM_UP_S
        warm: set[int] = set()
        for rows in (each for each in _ROWS + _MANY_ROWS if each <= max_rows):
            if clock() > deadline and len(warm) > 1:
                break
            if _runs(engine, _work(rows, tokens)):  # else there are no pages for so many
                warm.add(rows)
        deadline = clock() + _MAX_S
        for rows in (each for turn in _TURNS for each in turn if each in warm):
            if clock() > deadline and len(best) > 1:
                break
            started_at = clock()
            _runs(engine, _work(rows, tokens))
            time_s = clock() - started_at
            best[rows] = min(best.get(rows, time_s), time_s)
    finally:
        engine.release(_REQUEST)
    measured = sorted(best)
    return StepProfile.of(measured, [best[rows] for rows in measured])


def _work(rows: int, tokens: TokenArray) -> Work:
    """A sequence's last token and leaves beside each other: `rows` rows."""
    _, last, leaves = np.split(tokens[: _CONTEXT_LEN + rows], [_CONTEXT_LEN, _CONTEXT_LEN + 1])
    return Work(_REQUEST, _CONTEXT_LEN, last, TokenTree.of(leaves, np.full(rows - 1, -1)))


def _runs(engine: Steps, work: Work) -> bool:
    """Run one work; False where it cannot be."""
    logits = run_alone(engine, work).logits
    if logits is not None:
        received(logits[:1, :1])  # only then a GPU is done
    return logits is not None
