"""When a drafter is left alone, and what follows from a refusal."""

import math

import pytest

from cluster.draft.breaker import CircuitBreaker, Ruling, has_stalled
from cluster.errors import (
    CapacityError,
    ProtocolError,
    RequestError,
    TooLargeError,
    UnavailableError,
    WorkerError,
)


def test_on_probation_one_failure_opens_and_one_success_closes():
    breaker = CircuitBreaker(2, 10.0)
    breaker.record_failure("link", 0.0)
    breaker.record_failure("link", 0.0)
    assert breaker.state(10.0) == "probation"
    assert breaker.record_failure("link", 10.0)
    assert breaker.state(19.0) == "open"
    breaker.record_success()
    assert breaker.state(20.0) == "closed"
    assert not breaker.record_failure("link", 21.0)


@pytest.mark.parametrize(
    ("code", "ruling"),
    [
        (RequestError.code, Ruling("", math.inf)),
        (TooLargeError.code, Ruling("", math.inf)),
        (CapacityError.code, Ruling("", 10.0)),
        (UnavailableError.code, Ruling("", 10.0)),
        (ProtocolError.code, Ruling("rubbish", 10.0)),
        (WorkerError.code, Ruling("refused", 10.0)),
        ("a code of another release", Ruling("rubbish", 10.0)),
    ],
)
def test_a_refusal_is_a_fault_unless_it_is_the_request_or_a_lack_of_room(code: str, ruling: Ruling):
    assert CircuitBreaker(2, 10.0).rule(code) == ruling


def test_a_drafter_rests_until_its_stalls_have_cost_no_more_than_a_fiftieth_of_the_time():
    breaker = CircuitBreaker(2, 10.0)
    assert breaker.record_stall(0.2, 100.0) == 0.0
    assert breaker.allows(100.0)
    assert breaker.record_stall(1.05, 100.0) == pytest.approx(50.0)
    assert (breaker.state(149.0), breaker.allows(149.0)) == ("resting", False)
    assert (breaker.state(151.0), breaker.allows(151.0)) == ("closed", True)
    breaker.record_success()  # which says nothing of its stalls
    assert not breaker.allows(149.0)


def test_a_reset_forgets_all_but_what_stalls_have_cost_where_that_is_kept():
    breaker = CircuitBreaker(1, 10.0)
    breaker.record_failure("rubbish", 0.0)
    breaker.record_stall(3.0, 0.0)
    assert breaker.faults == {"rubbish": 1, "stalled": 1}
    breaker.reset(keeps_stalls=True)
    assert (breaker.faults, breaker.state(0.0)) == ({}, "resting")
    breaker.reset()
    assert breaker.state(0.0) == "closed"


def test_a_call_has_stalled_that_takes_far_longer_than_all_have_together():
    assert has_stalled(0.11, 0.01)
    assert not has_stalled(0.09, 0.001)
    assert not has_stalled(0.7, 0.1)
    assert has_stalled(0.9, 0.1)
