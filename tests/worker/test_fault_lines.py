"""What the console says of a drafter that fails: what, where, once a minute; never its message."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.core import Commit, DraftTask, Observation, Proposal
from cluster.draft.breaker import CircuitBreaker
from cluster.draft.inside import StepRows, StepWants
from cluster.draft.runner import Runner
from cluster.errors import ProtocolError, RequestError
from cluster.messages import Refusal
from cluster.spec.token_log import TokenLog
from deployments.console_log import is_wanted
from tests.support.clock import FakeClock
from tests.support.worker.draft_peer import CountingDrafter

SECRET = "what the prompt says"
COMMIT = Commit("r", 1, 0, 0, TokenLog().token_ids, 0, 4)


class Raising(CountingDrafter):
    def __init__(self, kind: type[Exception]) -> None:
        super().__init__()
        self.kind = kind

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        raise self.kind(SECRET)

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        raise self.kind(SECRET)

    def release(self, request_ids: Sequence[str]) -> None:
        raise self.kind(SECRET)

    @property
    def wants(self) -> StepWants:
        raise self.kind(SECRET)

    def read(self, rows: Sequence[StepRows]) -> None:
        raise self.kind(SECRET)

    @property
    def pages_in_use(self) -> int:
        raise self.kind(SECRET)

    pages_total = 1

    def interrupt(self) -> None:
        raise self.kind(SECRET)


def contained(drafter: Any, clock: FakeClock) -> Runner:
    return Runner(drafter, "mine", CircuitBreaker(3, 2.0), clock)


def propose(drafter: Runner) -> list[Refusal]:
    drafter.growing["r"] = DraftTask("r", 1, 4)
    return drafter.grow()[1]


def call_all(drafter: Runner) -> list[str]:
    """Calls everything that it has; returns what the refusals say."""
    refusals = [*propose(drafter), *drafter.tell([COMMIT])]
    drafter.release(["r"])
    drafter.interrupt()
    assert drafter.pages == (0, 0)
    return [getattr(each, "message", "") for each in refusals]


@pytest.mark.parametrize("kind", [ValueError, KeyError, RequestError, ProtocolError])
def test_type_file_and_line_are_said_and_the_message_is_not(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        told = call_all(contained(Raising(kind), FakeClock()))
    place = rf"{kind.__name__} \(.*/test_fault_lines\.py, line \d+\)"
    assert caplog.messages
    assert all(re.search(place, line) for line in (*caplog.messages, *told))
    assert SECRET not in "\n".join([caplog.text, *told])


def test_a_fault_is_one_line_that_the_console_shows(caplog: pytest.LogCaptureFixture) -> None:
    call_all(contained(Raising(ValueError), FakeClock()))
    for record in caplog.records:
        form = "%(levelname)s %(asctime)s %(name)s: %(message)s"
        (line,) = logging.Formatter(form).format(record).splitlines()
        assert is_wanted(line)


def test_a_fault_is_said_once_a_minute_with_its_count(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    drafter = contained(Raising(ValueError), clock)
    caplog.clear()
    for _ in range(50):
        propose(drafter)
    of_propose = [line for line in caplog.messages if "request=r " in line]
    assert len(of_propose) == 1
    clock.now += 61.0
    propose(drafter)
    assert "times=51" in [line for line in caplog.messages if "request=r " in line][-1]


def test_an_answer_that_is_none_is_told_without_quoting_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Lying(CountingDrafter):
        def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Any]:
            return SECRET

        def observe(self, commits: Sequence[Commit]) -> Sequence[Any]:
            return [SECRET]

    told = call_all(contained(Lying(), FakeClock()))
    assert "a str is no Proposal" in caplog.text
    assert "answered a commit with a str" in caplog.text
    assert SECRET not in "\n".join([caplog.text, *told])
