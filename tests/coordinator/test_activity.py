"""The coordinator's lines in the log: when there is one, and what stands in it."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from cluster.config.schema import Config
from cluster.coordinator.moment import Series
from cluster.coordinator.present import Answered, Present
from cluster.core import SamplingParams, token_array
from cluster.metrics.recorder import Recorder
from cluster.requests.fields import PlainWhy
from cluster.rpc.messages import Load, TextVerdict
from tests.support.coordinator.house import at_work, session
from tests.support.coordinator.toys import ToyDrafter, oracle_chain


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cluster.coordinator.moment")


def series(now: float, *targets: Load) -> Series:
    present = Present(Config(), Recorder(), lambda: now)
    present.seats = dict(enumerate(SimpleNamespace(load=each) for each in targets))
    return Series(present)


def answer(
    num_tokens: int,
    *given: SamplingParams,
    num_nodes: int = 0,
    why: PlainWhy = PlainWhy.NONE,
    is_first: bool = False,
) -> Answered:
    accepted = np.ones(num_tokens - 1 if num_nodes else 0, np.uint32)
    tokens = token_array(range(num_tokens))
    verdict = TextVerdict("r", 1, 5, tokens, accepted, num_nodes=num_nodes, why=why)
    return Answered(session(range(50), *given), verdict, 1.0, None if is_first else 0.5)


def test_every_ten_seconds_of_work_have_a_line(caplog: pytest.LogCaptureFixture):
    targets = [Load(pages_in_use=number, pages_total=60) for number in (10, 20)]
    activity = series(100.0, *targets)
    activity._enter_answers(
        [
            answer(0, is_first=True),  # the prompt's own step could have had none
            answer(1, why=PlainWhy.NO_DRAFTS),
            answer(4, num_nodes=8),
            answer(3, num_nodes=8),
            answer(7, SamplingParams(forced_ids=(1,) * 9)),
        ]
    )
    own = Load(num_running=3, num_waiting=1)
    activity.tick(109.5, own)
    assert caplog.messages == []
    activity.tick(110.0, own)
    assert caplog.messages == [
        "running 3 requests, waiting 1, prompt 5.7 tokens/s, output 0.8 tokens/s, "
        "mean acceptance length 3.50, plain steps 33% (no_drafts 1), KV cache 25.0 %"
    ]


def test_nothing_is_said_of_idle_times(caplog: pytest.LogCaptureFixture):
    activity = series(0.0)
    for now in range(1, 100):
        activity.tick(float(now), Load())
    assert caplog.messages == []
    activity._enter_answers([answer(1)])
    activity.tick(100.0, Load())
    assert len(caplog.messages) == 1


async def test_a_coordinator_tells_what_it_has_served(caplog: pytest.LogCaptureFixture):
    async with at_work(ToyDrafter("a", oracle_chain())) as stage:
        await stage.ask(range(20))
        await stage.settle()
        await stage.pass_time(10.0)
    (line,) = caplog.messages
    assert "running 0 requests, waiting 0, prompt 2.0 tokens/s, output 4.0 tokens/s" in line
    assert "mean acceptance length 1.00" not in line
