"""The policy in Ray Serve's hands, in virtual time: steps of load are followed, and no noise."""

import logging
import math
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace

import pytest
from ray.serve import autoscaling_policy
from ray.serve._private.common import DeploymentID, TimeStampedValue
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from deployments.autoscaling import ByStatistics
from deployments.replica import Demand
from tests.support.choices import by_day

PLACES = 8
START_S = 5.0  # until a replica that was asked for runs
TELL_S = 1.0  # from what a replica has to do to what Serve's controller knows of it
DOWN_S = 40.0
CONFIG = AutoscalingConfig(
    min_replicas=1,
    max_replicas=8,
    upscale_delay_s=3,
    downscale_delay_s=DOWN_S,
    look_back_period_s=5,
)

Load = Callable[[float], int]


class Pool:
    """A pool of drafters under a load of texts; Serve's controller looks at it twice a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, price: float = 0.0) -> None:
        self.now, self._price = 0.0, price
        self.target = 1
        self.worth_of_text = 10.0
        self.start_s = START_S
        self.changes: list[tuple[float, int]] = []
        self._starts = [-math.inf]  # of each replica: when it began to run
        self._said: list[tuple[float, list[dict[str, float]]]] = []
        self._state = {}
        clock = SimpleNamespace(time=lambda: self.now)
        monkeypatch.setattr(autoscaling_policy, "time", clock)
        # As Serve's controller wraps whatever policy is named.
        wrap = autoscaling_policy._apply_autoscaling_config
        self._policy = wrap(ByStatistics())

    def run(self, until_s: float, load: Load) -> None:
        while self.now < until_s:
            self.now += 0.5
            self._step(load(self.now))

    def _step(self, texts: int) -> None:
        num = sum(start <= self.now for start in self._starts)
        held = min(texts, num * PLACES)
        told = {"waiting": float(texts - held), "worth": texts * self.worth_of_text}
        told["price"] = self._price
        says = {"texts": held / num, "places": PLACES, "late": 0.1 * held / num / PLACES, **told}
        self._said.append((self.now, [says] * num))
        known = [said for at, said in self._said if at <= self.now - TELL_S]
        wanted, self._state = self._policy(self._context(num, known[-1] if known else []))
        wanted = min(max(wanted, CONFIG.min_replicas), CONFIG.max_replicas)
        if wanted != self.target:
            self.changes.append((self.now, wanted))
            self._starts = self._starts[:wanted]
            self._starts += [self.now + self.start_s] * (wanted - len(self._starts))
        self.target = wanted

    def _context(self, num: int, said: list[dict[str, float]]) -> AutoscalingContext:
        names = {name for each in said for name in each}
        raw = {
            name: {
                f"r{place}": [TimeStampedValue(self.now, each[name])]
                for place, each in enumerate(said[:num])
            }
            for name in names
        }
        return AutoscalingContext(
            deployment_id=DeploymentID("drafter-lm", "app"),
            deployment_name="drafter-lm",
            app_name="app",
            current_num_replicas=num,
            target_num_replicas=self.target,
            running_replicas=[],
            total_num_requests=0.0,
            total_queued_requests=0.0,
            aggregated_metrics={},
            raw_metrics=raw,
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=CONFIG.max_replicas,
            policy_state=self._state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=self.now,
            config=CONFIG,
        )


def noisy(mean: float, seed: int) -> Load:
    """Texts that come and go by themselves, about as many at a time as Poisson's law has it."""
    random, texts = Random(seed), mean

    def load(now: float) -> int:
        nonlocal texts
        texts += 0.05 * (mean - texts) + random.gauss(0, 0.3 * mean**0.5)
        return max(round(texts), 0)

    return load


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="ray.serve.autoscaling"):
        yield caplog


def test_a_step_of_load_is_followed_within_fifteen_seconds_and_taken_back_after_the_delay(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
):
    pool = Pool(monkeypatch)
    pool.run(30, lambda now: 4)
    assert pool.changes == []
    pool.run(100, lambda now: 24)
    ((at, num),) = pool.changes
    assert num == 3
    assert at + START_S <= 30 + 15
    pool.run(300, lambda now: 2)
    (first, second) = pool.changes[1:]
    assert [first[1], second[1]] == [2, 1]
    assert 100 + DOWN_S <= first[0] <= 100 + DOWN_S + 2 * TELL_S
    assert second[0] - first[0] >= DOWN_S
    assert "drafter-lm: 1 -> 3: 8 texts in 8 places, 16 waiting" in logged.text
    assert "drafter-lm: 2 -> 1: 2 texts in 16 places, 0 waiting" in logged.text


@pytest.mark.parametrize(
    "mean", by_day([5.6, 16, 40], [1, 5.6, 8, 8.8, 11.2, 16, 17.6, 24, 30, 40])
)
@pytest.mark.parametrize("seed", by_day([1], [1, 2, 3]))
def test_a_noisy_load_makes_nothing_swing_in_five_minutes(
    mean: float, seed: int, monkeypatch: pytest.MonkeyPatch
):
    pool = Pool(monkeypatch)
    pool.run(300, noisy(mean, seed))
    numbers = [1, *(num for _, num in pool.changes)]
    top = numbers.index(max(numbers))
    assert numbers[:top] == sorted(numbers[:top]), numbers
    assert numbers[top:] == sorted(numbers[top:], reverse=True), "what is given up is not missed"
    assert numbers[-1] <= math.ceil(1.5 * mean / PLACES) + 1


def test_a_pool_whose_trees_do_not_pay_stays_small(monkeypatch: pytest.MonkeyPatch):
    pool = Pool(monkeypatch, price=200.0)
    pool.run(60, lambda now: 24)
    assert pool.changes == [], "24 texts bring 240 tokens/s, and two replicas cost 400"
    pool.worth_of_text = 50.0
    pool.run(120, lambda now: 24)
    assert [num for _, num in pool.changes] == [3]
    pool.worth_of_text = 10.0
    pool.run(400, lambda now: 24)
    assert [num for _, num in pool.changes] == [3, 2, 1]


def test_replicas_that_find_no_room_are_given_up_once_nobody_needs_them(
    monkeypatch: pytest.MonkeyPatch,
):
    pool = Pool(monkeypatch)
    pool.start_s = math.inf
    pool.run(100, lambda now: 24)
    assert pool.target == 3
    pool.run(300, lambda now: 2)
    assert pool.target == 1


def test_replicas_know_what_coordinators_have_said_of_late():
    now = 0.0
    demand = Demand(lambda: now)
    assert demand.total() == {}
    demand.note("first", {"waiting": 2, "worth": 1.5})
    demand.note("second", {"waiting": 1, "worth": 2.0})
    demand.note("second", {"waiting": 3, "worth": 2.0})
    assert demand.total() == {"waiting": 5, "worth": 3.5}
    now = 4.0
    demand.note("second", {"waiting": 0, "worth": 0.5})
    now = 6.0
    assert demand.total() == {"waiting": 0, "worth": 0.5}, "the first one has fallen silent"
