"""What clients are told is counted once, as it is told, and by one reason."""

import pytest

from cluster.metrics.recorder import Recorder
from cluster.metrics.told import INGRESS, Tokens, Told, ToldRequest
from tests.support.clock import FakeClock
from tests.support.metrics import page

OURS = "drafthouse_requests_total"


def test_tokens_are_counted_as_they_come_and_once():
    recorder = Recorder(only=INGRESS)
    request = ToldRequest(Told(recorder), "code", "app")
    request.grow(Tokens(prompt=5, cached=2, output=1))
    request.grow(Tokens(prompt=5, cached=2, output=1))
    request.grow(Tokens(prompt=5, cached=2, output=4))
    request.end(["stop"])
    found = page(recorder)
    assert found["drafthouse_prompt_tokens_total app code"] == 5
    assert found["drafthouse_output_tokens_total app code"] == 4
    assert found["drafthouse_requests_total stop app code"] == 1
    assert [value for name, value in found.items() if "prompt_tokens_cached_total" in name] == [2]


@pytest.mark.parametrize(
    ("reasons", "counted"),
    [
        (["stop", "stop"], "stop"),
        (["stop", "length"], "length"),
        (["length", "cancelled"], "cancelled"),
        (["error", "cancelled", "stop"], "error"),
    ],
)
def test_a_request_with_several_texts_counts_by_one_reason(reasons: list[str], counted: str):
    recorder = Recorder(only=INGRESS)
    request = ToldRequest(Told(recorder), "code", "")
    request.grow(Tokens(prompt=1))
    request.end(reasons)
    found = {name: value for name, value in page(recorder).items() if OURS in name}
    assert found == {f"drafthouse_requests_total {counted}  code": 1}


def test_an_error_before_the_answer_is_a_refusal_and_later_it_is_not():
    recorder = Recorder(only=INGRESS)
    told = Told(recorder)
    ToldRequest(told, "code", "").end(["error"], "worker_error")
    begun = ToldRequest(told, "code", "")
    begun.grow(Tokens(prompt=1, output=1))
    begun.end(["error"], "worker_error")
    found = page(recorder)
    assert found["drafthouse_rejected_requests_total worker_error"] == 1
    assert found["drafthouse_requests_total error  code"] == 1


def test_a_rate_is_of_the_last_ten_full_seconds():
    recorder, clock = Recorder(only=INGRESS), FakeClock()
    ToldRequest(Told(recorder, clock), "code", "").grow(Tokens(prompt=30, output=5))

    def rates() -> tuple[float, float]:
        found = page(recorder)
        name = "drafthouse_tokens_per_second"
        return found[f"{name} prompt"], found[f"{name} output"]

    assert rates() == (0.0, 0.0)
    clock.now += 10.0
    assert rates() == (3.0, 0.5)
    clock.now += 10.0
    assert rates() == (0.0, 0.0)
