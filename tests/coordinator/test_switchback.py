"""Windows without drafts measure what drafts bring, whatever the load does meanwhile."""

import math

import numpy as np
import pytest

from cluster import metrics
from cluster.config.parse import parse
from cluster.config.schema import Config, CoordinatorConfig
from cluster.config.speculation import SwitchbackConfig
from cluster.coordinator.switchback import Switchback
from cluster.errors import ConfigError
from cluster.metrics.recorder import Recorder
from tests.support.choices import by_day
from tests.support.clock import FakeClock
from tests.support.coordinator.house import at_work
from tests.support.coordinator.toys import ToyDrafter, oracle_chain

PERIOD_S, WINDOW_S, NUM_PERIODS = 500, 10, 24


def config(**settings: float) -> Config:
    return Config(coordinator=CoordinatorConfig(switchback=SwitchbackConfig(**settings)))


def speedup(recorder: Recorder, bound: str = "mean") -> float | None:
    name = metrics.SWITCHBACK_SPEEDUP.name
    return recorder.registry.get_sample_value(name, {"bound": bound})


@pytest.mark.parametrize("truth", by_day([0.9], [0.9, 1.0, 1.3]))
def test_a_true_ratio_is_found_though_the_load_drifts(truth: float):
    clock, recorder = FakeClock(), Recorder()
    clock.now = 10_000.0
    switchback = Switchback(
        config(period_s=PERIOD_S, window_s=WINDOW_S), recorder, wall=lambda: clock.now
    )
    generator = np.random.default_rng(int(100 * truth))
    num_plain = 0
    while clock.now < 10_000 + PERIOD_S * NUM_PERIODS:
        # Of 50 tokens a second, half of a day's tide, and what texts differ by.
        plain = 50.0 * (1.0 + 0.4 * math.sin(clock.now / 3000)) * generator.lognormal(0.0, 0.1)
        speed = plain * (1.0 if switchback.is_plain_now else truth)
        num_plain += switchback.is_plain_now
        switchback.note(8 * round(speed), 8 * round(speed) / speed)
        switchback.tick()
        clock.now += 1.0
    low, high = speedup(recorder, "low"), speedup(recorder, "high")
    assert speedup(recorder) == pytest.approx(truth, abs=0.03)
    assert low - 0.03 < truth < high + 0.03
    assert num_plain == WINDOW_S * NUM_PERIODS
    page = recorder.render().decode()
    for arm in ("drafts", "plain_windows"):
        assert f'drafthouse_arm_tokens_total{{arm="{arm}"}}' in page


def test_windows_leave_time_around_them():
    config(period_s=60.0)
    given = {"coordinator": {"switchback": {"period_s": 50.0}}}
    with pytest.raises(
        ConfigError,
        match=r"coordinator\.switchback\.period_s: 50 s are less than 6 windows of 10",
    ):
        parse(Config, given)


@pytest.mark.parametrize(
    ("num_tokens", "wait_s", "mean"), [(9, 0.5, None), (10, 0.5, 1.0), (10, 0.0, None)]
)
def test_fewer_than_a_hundred_tokens_of_a_window_tell_nothing_nor_do_those_of_no_time(
    num_tokens: int, wait_s: float, mean: float | None
):
    """Of its twelve seconds two pass until all targets know of it."""
    clock, recorder = FakeClock(), Recorder()
    given = config(period_s=100, window_s=12)
    switchback = Switchback(given, recorder, wall=lambda: clock.now)
    for _ in range(1000):
        switchback.note(num_tokens, wait_s)
        switchback.tick()
        clock.now += 1.0
    assert speedup(recorder) == pytest.approx(mean)


async def test_in_a_window_texts_are_plain_and_say_why():
    clock, given = FakeClock(), config(period_s=100.0)
    async with at_work(
        ToyDrafter("a", oracle_chain()), switchback=given.coordinator.switchback
    ) as stage:
        stage.coordinator._switchback = Switchback(
            given, stage.coordinator.recorder, wall=lambda: clock.now
        )
        seen = []
        for now in (1000.0, 1095.0, 1100.0):
            clock.now = now
            await stage.pass_time(1.0)
            last = (await stage.ask((1, int(now) % 32)))[-1]
            seen.append((last.stats.num_spec_steps > 0, last.stats.idle_because))
        assert seen == [(True, ""), (False, "switchback"), (True, "")]
