"""Collects the rows of a step for the drafters that read them: works, draws and hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cluster.core import EMPTY_TOKENS, EMPTY_TREE, Verdict
from cluster.draft.inside import WANTS_NOTHING, StepRows, StepWants
from cluster.draft.told import params_beside_rows
from cluster.engine.taps import Taps
from cluster.engine.work import Output
from cluster.worker.target_sequence import TargetSequence

Answered = tuple[TargetSequence, Output, Verdict]


def rows_of_step(
    wants: StepWants,
    taps: Taps | None,
    answered: Sequence[Answered],
    sequences: Iterable[TargetSequence],
) -> list[StepRows]:
    """Return the rows of one step, before its verdicts become text.

    answered: those with a verdict, whose path is one through `TargetSequence.tree`.  sequences:
    all; the step may have run a chunk of those that are still pending.  Audits are left out: they
    write a text a second time, as a tenant of their own, and nobody is to learn from that.
    """
    if wants == WANTS_NOTHING:
        return []
    found = [_rows(wants, taps, *each) for each in answered]
    found += [_rows(wants, taps, each) for each in sequences if each.is_pending]
    return [rows for rows in found if rows is not None]


def _rows(
    wants: StepWants,
    taps: Taps | None,
    sequence: TargetSequence,
    output: Output | None = None,
    verdict: Verdict | None = None,
) -> StepRows | None:
    """Return the rows of one sequence, None if it has none to tell.  verdict: None = its prompt is
    still being read."""
    text, opened, tree = sequence.text, sequence.text.opened, sequence.tree
    tapped = None if taps is None else taps.of(text.id)
    first, num_context = len(text.tokens) - 1, 1
    if tapped is not None:
        first, num_context = tapped[0].first_position, tapped[0].num_context
    if opened.is_audit:
        return None
    if verdict is None:
        if tapped is None or not num_context or sequence.search is not None:
            return None
        tree = EMPTY_TREE
    path = EMPTY_TOKENS if verdict is None else verdict.path
    return StepRows(
        text.id,
        opened.generation,
        opened.task,
        opened.tenant,
        first,
        np.concatenate((text.tokens.since(first, first + num_context), tree.token_ids)),
        num_context,
        tree.parents,
        path,
        None if verdict is None else int(verdict.token_ids[-1]),
        None if tapped is None else tapped[1],
        output.top if output is not None and wants.num_top else None,
        params_beside_rows(text.params),
        opened.adapter,
    )
