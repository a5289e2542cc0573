"""Measures the times in which a target's residents draft and read, before it serves.

So the control loop need not measure them at the cost of requests: a model may take longer to read
the prompts of many requests than these take for their answers.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Iterable, Sequence

import numpy as np

from cluster.core import EMPTY_TREE, Clock, SamplingParams, token_array
from cluster.plan.texts import Team
from cluster.spec.budget import Ask
from cluster.spec.step_profile import DraftTime
from cluster.worker.residents import NOTHING_DRAFTED, Residents
from cluster.worker.texts import TargetText, measured_text
from cluster.worker.verifier import Verifier

log = logging.getLogger(__name__)

_SEQUENCES = (1, 4, 16)
_NODES = (8, 2, 24)
_PLAIN_TURNS = 40
_PROMPT_LEN = 8
_READ_LEN = 128  # tokens of a prompt, as in chats
_MAX_S = 1.0


def profile_drafting(
    verifier: Verifier,
    residents: Residents,
    vocab_size: int,
    max_sequences: int,
    clock: Clock = time.perf_counter,
) -> tuple[DraftTime, ...]:
    """Return the times of residents' turns after steps of up to max_sequences sequences, whose
    texts the target draws; empty if there are no residents or the measurement fails.

    Nothing else is measured after a second.
    """
    found: list[DraftTime] = []
    deadline = clock() + _MAX_S
    bench = _Bench(verifier, residents, vocab_size)
    members = [each.member for each in residents]
    look_ups = Team(each.name for each in members if each.is_look_up)
    teams = [look_ups, *(Team({each.name}) for each in members if not each.is_look_up)]
    try:
        for count, team in itertools.product(_SEQUENCES, teams):
            if not team or count > max_sequences or clock() > deadline:
                continue
            bench.open(count, _PROMPT_LEN)
            bench.turn(_NODES[0], team)  # a warm-up
            if count == 1:
                for each in residents:
                    each.begin_afresh(keeps_stalls=False)
            for nodes in _NODES:
                if clock() <= deadline:
                    found += bench.fastest(nodes, team)
            if team is not look_ups and count == 1:
                bench.open(1, _READ_LEN)
                found += bench.turn(_NODES[0], team)
    except Exception:  # a defect of ours: the target serves without knowing
        log.exception("drafting could not be timed")
        return ()
    finally:
        bench.release()
    for each in residents:
        each.begin_afresh(keeps_stalls=True)
    return tuple(found)


def plain_turn_s(verifier: Verifier, vocab_size: int) -> float:
    """Return the time of a plain step of one text, with all that belongs to it: the median of many,
    for a step of serving is not always the fastest one."""
    bench = _Bench(verifier, Residents(()), vocab_size)
    times_s = []
    try:
        bench.open(1, _PROMPT_LEN)
        for _ in range(_PLAIN_TURNS):
            began = time.perf_counter()
            bench.turn(0, Team())
            times_s.append(time.perf_counter() - began)
    finally:
        bench.release()
    return statistics.median(times_s)


class _Bench:
    """Several texts that are decoded at once."""

    def __init__(self, verifier: Verifier, residents: Residents, vocab_size: int) -> None:
        self._verifier = verifier
        self._residents = residents
        self._vocab_size = vocab_size
        self._numbers = itertools.count()
        self._texts: dict[str, TargetText] = {}

    def open(self, count: int, prompt_len: int) -> None:
        """Begin `count` texts in place of the former ones."""
        self.release()
        # New texts each time: a text that another kind has read already would falsify the measure.
        for number in itertools.islice(self._numbers, count):
            params = SamplingParams(temperature=1.0, seed=number + 1, max_tokens=1 << 20)
            tokens = token_array((number + np.arange(prompt_len)) % self._vocab_size)
            name = f"draft-profile-{number}"
            self._texts[name] = measured_text(name, tokens, params, self._residents.names)

    def release(self) -> None:
        request_ids = list(self._texts)
        self._texts.clear()
        self._verifier.release(request_ids)
        self._residents.release(request_ids)

    def fastest(self, nodes: int, team: Team) -> Iterable[DraftTime]:
        """Return of two turns the faster one of each resident."""
        turns = [*self.turn(nodes, team), *self.turn(nodes, team)]
        turns.sort(key=lambda each: -each.time_s)
        return {each.drafter: each for each in turns}.values()

    def turn(self, nodes: int, team: Team) -> Sequence[DraftTime]:
        """Make a step of all texts; returns the times of these residents after it, or nothing if it
        took several steps or there was an error."""
        if self._verifier.submit([(text, EMPTY_TREE) for text in self._texts.values()]):
            return []
        answered, drafted = 0, NOTHING_DRAFTED
        while self._verifier.has_pending:
            stepped = self._verifier.step()
            own = [self._texts[each.request_id] for each in stepped.verdicts]
            for text, verdict in zip(own, stepped.verdicts, strict=True):
                text.tokens.append(verdict.token_ids)
                text.ask, text.asked = Ask(nodes), team
            drafted = self._residents.draft(own, stepped.report, self._verifier.last_rows)
            answered = len(own)
        if answered != len(self._texts):
            return []
        return drafted.turns
