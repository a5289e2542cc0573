"""The price of waiting for drafts that are about to arrive: one of the budget's choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.spec.drafts import BatchDrafts, Gains, marginal_gains
from cluster.spec.goodput import GoodputModel
from cluster.spec.step_times import bucket

# A sequence is waited for if its drafts are expected to grow by so many tokens.
_MIN_PROMISE = 0.1
# How much longer than priced a wait may last.
_PATIENCE = 2.0


# Rounds with hardly a draft after which some are waited for whatever is known, at first and at
# most; twice as many each time while that leads to nothing.  With n sequences the first ones are
# multiplied by the root of n, as what they may lose is divided by it: a crowd's drafts take longer
# to come, and a shorter wait would not show them.
_FIRST_TRIAL = 4
_LAST_TRIAL = 256
# A trial goes on over so many commits, and at most so many rounds: the first trees after a time in
# which drafters had no turn are smaller than what comes once they are waited for, and what was
# learned before is outvoted by a few of them only slowly.
_TRIAL_COMMITS = 16
_TRIAL_ROUNDS = 4
# Of the waits that are bought one in so many is such a trial as well, beginning with the fourth:
# they end with the first drafts, and what would have come after those is never seen otherwise.
_BOUGHT_PER_TRIAL = 64


class WaitTrials:
    """When to wait for drafts without a price, to find out how fast they come.

    What comes while the target is at work does not tell: where they share a device it comes late,
    and a wait that is never tried never gets a price.  By load, as all that is learned of a target.
    """

    def __init__(self) -> None:
        self._intervals: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._more: dict[int, int] = {}  # rounds that the trial under way goes on
        self._num_paid: dict[int, int] = {}

    def is_due(self, num_sequences: int) -> bool:
        """To be asked in every round that has hardly a draft while some are on their way."""
        key = bucket(num_sequences)
        if self._more.get(key, 0) > 0:
            self._more[key] -= 1
            return True
        first = math.ceil(_FIRST_TRIAL * math.sqrt(key))
        left = self._left.get(key, first) - 1
        if left > 0:
            self._left[key] = left
            return False
        interval = min(2 * self._intervals.get(key, first), _LAST_TRIAL)
        self._intervals[key] = self._left[key] = interval
        self._more[key] = min(-(-_TRIAL_COMMITS // key), _TRIAL_ROUNDS) - 1
        return True

    def paid(self, num_sequences: int) -> bool:
        """A wait is bought at its price: what is known is of use.  Returns whether it is to be a
        trial."""
        key = bucket(num_sequences)
        self._intervals.pop(key, None)
        self._more.pop(key, None)  # a trial under way has told what it was for
        num_paid = self._num_paid[key] = self._num_paid.get(key, 0) + 1
        return num_paid % _BOUGHT_PER_TRIAL == _FIRST_TRIAL


@dataclass(frozen=True, slots=True)
class Standing:
    """The step that could start now: num_nodes, its goodput, and how long it has waited."""

    num_nodes: int
    goodput: float
    waited_s: float = 0.0


def price_wait(
    model: GoodputModel,
    batch: BatchDrafts,
    now: Standing,
    waits_s: Sequence[float],
    max_wait_s: float,
) -> tuple[float, tuple[int, ...]]:
    """How long to wait at most for better drafts, and for which sequences; 0 = not at all.

    What is expected after a wait may come a little later, and the wait ends when it comes: so it
    may last up to twice as long as it was priced for, which the guard must allow.

    A wait must beat the step that could start `now`, and pay for its time at the rate of the last
    rounds: the drafts that are missing now will mostly be there a step later, so a plain step is
    no loss of more than one round.
    waits_s: those to consider, ascending; a beginning of what `BatchDrafts.arriving` speaks of.
    """
    num_sequences, goodput = len(batch), now.goodput
    step_s, rate = model.times.estimate(num_sequences, now.num_nodes), model.rate(num_sequences)
    if batch.arriving is None or batch.is_arriving is None or step_s is None or rate is None:
        return 0.0, ()
    margin = 1.0 + model.rules.hysteresis
    weight = float(batch.weights.sum())
    best_index, bar = -1, goodput * margin
    later = _later(batch, model.rules.max_step_nodes, len(waits_s))
    counts, goodputs = model.best_later(num_sequences, weight, later, waits_s)
    for index, (wait_s, count, best) in enumerate(zip(waits_s, counts, goodputs, strict=True)):
        time_s = wait_s + (model.times.estimate(num_sequences, count) or step_s)
        gained = best * time_s - goodput * step_s
        if best <= bar or gained <= margin * rate * (time_s - step_s):
            continue
        longest_s = now.waited_s + min(_PATIENCE * wait_s, max_wait_s)
        if model.allows(num_sequences, count, longest_s):
            best_index, bar = index, best
    if best_index < 0:
        return 0.0, ()
    arriving = batch.arriving[:, best_index]
    at_hand = batch.profiles(arriving.shape[1])
    growth = arriving.sum(axis=1) - at_hand.sum(axis=1)
    is_awaited = batch.is_arriving & (batch.caps > 0) & (growth >= _MIN_PROMISE)
    awaited = tuple(np.flatnonzero(is_awaited).tolist())
    patience_s = min(_PATIENCE * waits_s[best_index], max_wait_s)
    return (patience_s, awaited) if awaited else (0.0, ())


def _later(batch: BatchDrafts, max_nodes: int, num_waits: int) -> Gains:
    """The rankings to expect after each of the first waits: float64[waits, n], best first.

    Where there are fewer nodes after a wait than after another, zeros stand for the rest.
    """
    assert batch.arriving is not None
    assert batch.is_arriving is not None
    is_counted = (batch.ranks < batch.caps[batch.owners]) & ~batch.is_arriving[batch.owners]
    at_hand = batch.gains(is_counted)
    is_open = np.arange(batch.arriving.shape[2]) < batch.caps[batch.is_arriving, np.newaxis]
    arriving = batch.arriving[batch.is_arriving, :num_waits]
    arriving = marginal_gains(arriving) * batch.weights[batch.is_arriving, np.newaxis, np.newaxis]
    theirs = arriving.transpose(1, 0, 2)[:, is_open]
    gains = np.empty((num_waits, len(at_hand) + theirs.shape[1]))
    gains[:, : len(at_hand)] = at_hand
    gains[:, len(at_hand) :] = theirs
    gains.sort(axis=1)
    return gains[:, ::-1][:, :max_nodes]
