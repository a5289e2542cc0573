"""The price of waiting for drafts that are about to arrive: one of the budget's choices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.spec.drafts import Gains, SequenceDraft
from cluster.spec.goodput import GoodputModel

# A sequence is waited for if its drafts are expected to grow by so many tokens.
_MIN_PROMISE = 0.1
# How much longer than priced a wait may last.
_PATIENCE = 2.0


def price_wait(
    model: GoodputModel,
    batch: Sequence[SequenceDraft],
    caps: Sequence[int],
    num_nodes: int,
    goodput: float,
    waits_s: Sequence[float],
    max_wait_s: float,
    waited_s: float = 0.0,
) -> tuple[float, tuple[int, ...]]:
    """How long to wait at most for better drafts, and for which sequences; 0 = not at all.

    What is expected after a wait may come a little later, and the wait ends when it comes: so it
    may last up to twice as long as it was priced for, which the guard must allow.

    num_nodes, goodput: of the step that could start now.  A wait must beat that step, and pay for
    its time at the rate of the last rounds: the drafts that are missing now will mostly be there
    a step later, so a plain step is no loss of more than one round.
    waits_s: those to consider, ascending; a beginning of what `SequenceDraft.promised` speaks of.
    waited_s: has been waited already.
    """
    num_sequences = len(batch)
    step_s, rate = model.times.estimate(num_sequences, num_nodes), model.rate(num_sequences)
    has_promises = any(draft.promised is not None for draft in batch)
    if not has_promises or step_s is None or rate is None:
        return 0.0, ()
    margin = 1.0 + model.rules.hysteresis
    weight = sum(draft.weight for draft in batch)
    best_index, bar = -1, goodput * margin
    for index, wait_s in enumerate(waits_s):
        later = model.goodputs(num_sequences, weight, _ranked(batch, caps, model, index), wait_s)
        count = max(later, key=lambda n: (later[n], -n))
        time_s = wait_s + (model.times.estimate(num_sequences, count) or step_s)
        gained = later[count] * time_s - goodput * step_s
        if later[count] <= bar or gained <= margin * rate * (time_s - step_s):
            continue
        if model.allows(num_sequences, count, waited_s + min(_PATIENCE * wait_s, max_wait_s)):
            best_index, bar = index, later[count]
    if best_index < 0:
        return 0.0, ()
    awaited = tuple(
        index
        for index, (draft, cap) in enumerate(zip(batch, caps, strict=True))
        if cap and _growth(draft, best_index) >= _MIN_PROMISE
    )
    patience_s = min(_PATIENCE * waits_s[best_index], max_wait_s)
    return (patience_s, awaited) if awaited else (0.0, ())


def _ranked(
    batch: Sequence[SequenceDraft], caps: Sequence[int], model: GoodputModel, index: int
) -> Gains:
    """The ranking to expect after a wait, best first."""
    gains = [
        (_at_hand(draft) if draft.promised is None else draft.promised[index])[:cap] * draft.weight
        for draft, cap in zip(batch, caps, strict=True)
    ]
    ranked = np.sort(np.concatenate(gains))[::-1][: model.rules.max_step_nodes]
    return np.asarray(ranked[ranked > 0.0])


def _growth(draft: SequenceDraft, index: int) -> float:
    """By how many tokens a sequence's drafts are expected to grow."""
    if draft.promised is None:
        return 0.0
    promised = draft.promised[index]
    return float(promised.sum() - _at_hand(draft)[: len(promised)].sum())


def _at_hand(draft: SequenceDraft) -> Gains:
    return np.sort(np.nan_to_num(draft.survival.astype(np.float64), nan=0.0))[::-1]
