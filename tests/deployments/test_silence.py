"""A target that stops without a word while it serves streams: the texts go on when it does.

Where there is another one, they go on there: tests/nodes stops one of two.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from tests.deployments.conftest import Served, wait_until
from tests.support.choices import by_night

NUM_STREAMS, NUM_TOKENS = 4, 400
# Longer than any silence after which a part is left.
PAUSE_S = float(os.environ.get("DRAFTHOUSE_PAUSE_S", "5"))


def read(served: Served, number: int, texts: list[str]) -> str:
    body = {"prompt": f"abc {number} abc", "temperature": 0.7, "seed": number, "ignore_eos": True}
    for chunk in served.api.read("/v1/completions", **body, max_tokens=NUM_TOKENS):
        texts.append(chunk["choices"][0]["text"])
    return "".join(texts)


def streamed(served: Served, disturb: Callable[[], None]) -> list[str]:
    """The texts of some streams at once; `disturb` is called when every one of them has begun."""
    streams: list[list[str]] = [[] for _ in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(read, served, *each) for each in enumerate(streams)]
        wait_until(lambda: all(len(each) >= 10 for each in streams))
        disturb()
        return [each.result() for each in running]


@pytest.fixture(scope="module")
def undisturbed(served: Served) -> list[str]:
    return streamed(served, lambda: None)


@contextmanager
def resumed_afterwards(pids: list[int]) -> Iterator[None]:
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@by_night
def test_the_only_target_is_left_when_it_stops_and_taken_back_when_it_goes_on(
    served: Served, undisturbed: list[str]
):
    (stopped,) = served.pids("target")

    def stop() -> None:
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: served.health()["targets"] == 0)
        os.kill(stopped, signal.SIGCONT)

    with resumed_afterwards([stopped]):
        texts = streamed(served, stop)
    assert texts == undisturbed
    assert served.pids("target") == [stopped]


def test_a_pause_of_all_processes_costs_no_text_and_nobody_is_left(
    served: Served, undisturbed: list[str]
):
    """As when a laptop sleeps, or a machine moves to another host."""
    targets, failovers = served.pids("target"), served.metric("drafthouse_failovers_total")

    def pause() -> None:
        everybody = psutil.Process().children(recursive=True)
        with resumed_afterwards([each.pid for each in everybody]):
            for each in everybody:
                each.suspend()
            time.sleep(PAUSE_S)

    assert streamed(served, pause) == undisturbed
    assert served.pids("target") == targets
    assert served.metric("drafthouse_failovers_total") == failovers
    assert served.health()["status"] == "ok"
