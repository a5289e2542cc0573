"""Collects the rows of a step for the drafters that read them: works, draws and hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cluster.core import EMPTY_TOKENS, Verdict
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
    found = [_answered(wants, taps, *each) for each in answered if not each[0].text.opened.is_audit]
    places = {each.request_id: each for each in taps.sequences} if taps is not None else {}
    for sequence in sequences:
        text, opened = sequence.text, sequence.text.opened
        place = places.get(text.id)
        if taps is None or place is None or not place.num_context:
            continue
        if not sequence.is_pending or sequence.search is not None or opened.is_audit:
            continue
        first, count = place.first_position, place.num_context
        found.append(
            StepRows(
                text.id,
                opened.generation,
                opened.task,
                opened.tenant,
                first,
                text.tokens.since(first, first + count),
                count,
                EMPTY_TOKENS,
                EMPTY_TOKENS,
                None,
                taps.rows[place.start : place.stop],
            )
        )
    return found


def _answered(
    wants: StepWants, taps: Taps | None, sequence: TargetSequence, output: Output, verdict: Verdict
) -> StepRows:
    text, opened, tree = sequence.text, sequence.text.opened, sequence.tree
    tapped = None if taps is None else taps.of(text.id)
    first, num_context = len(text.tokens) - 1, 1
    if tapped is not None:
        first, num_context = tapped[0].first_position, tapped[0].num_context
    return StepRows(
        text.id,
        opened.generation,
        opened.task,
        opened.tenant,
        first,
        np.concatenate((text.tokens.since(first), tree.token_ids)),
        num_context,
        tree.parents,
        verdict.path,
        int(verdict.token_ids[-1]),
        None if tapped is None else tapped[1],
        output.top if wants.num_top else None,
        params_beside_rows(text.params),
        opened.adapter,
    )
