"""Collects the rows of a step for the drafters that read them: works, draws and hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cluster.core import EMPTY_TOKENS, Verdict, VerifyItem
from cluster.draft.inside import WANTS_NOTHING, StepRows, StepWants
from cluster.engine.taps import TapRows, Taps
from cluster.engine.work import Output
from cluster.worker.target_sequence import TargetSequence

Answered = tuple[VerifyItem, TargetSequence, Output, Verdict]
Unfinished = tuple[VerifyItem, TargetSequence]


def rows_of_step(
    wants: StepWants, taps: Taps | None, answered: Sequence[Answered],
    unfinished: Iterable[Unfinished],
) -> list[StepRows]:  # fmt: skip
    """Return the rows of one step.

    answered: the items with a verdict.  unfinished: the items of which the step may have run a
    chunk.
    """
    if wants == WANTS_NOTHING:
        return []
    found = [_answered(wants, taps, *each) for each in answered]
    if taps is not None:
        places = {each.request_id: each for each in taps.sequences}
        for item, sequence in unfinished:
            place = places.get(item.request_id)
            if place is not None and place.num_context:
                found.append(_chunk(item, sequence, taps, place))
    return found


def _answered(
    wants: StepWants, taps: Taps | None, item: VerifyItem, sequence: TargetSequence,
    output: Output, verdict: Verdict,
) -> StepRows:  # fmt: skip
    tapped = None if taps is None else taps.of(item.request_id)
    first, num_context = item.context_len - 1, 1
    if tapped is not None:
        first, num_context = tapped[0].first_position, tapped[0].num_context
    text = item.delta[first - item.base_len :]
    return StepRows(
        item.request_id, item.generation, sequence.task, sequence.tenant, first,
        np.concatenate((text, item.tree.token_ids)), num_context, item.tree.parents, verdict.path,
        int(verdict.token_ids[-1]), None if tapped is None else tapped[1],
        output.top if wants.num_top else None,
    )  # fmt: skip


def _chunk(item: VerifyItem, sequence: TargetSequence, taps: Taps, place: TapRows) -> StepRows:
    start = place.first_position - item.base_len
    return StepRows(
        item.request_id, item.generation, sequence.task, sequence.tenant, place.first_position,
        item.delta[start : start + place.num_context], place.num_context, EMPTY_TOKENS,
        EMPTY_TOKENS, None, taps.rows[place.start : place.stop],
    )  # fmt: skip
