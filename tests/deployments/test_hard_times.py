"""A whole server, without Ray, whose cores others take or whose wall clock jumps.

A pause of all its processes is in test_silence.py, where they are several.
"""

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cluster.engine.engine import Engine
from cluster.engine.work import Output
from tests.support.choices import by_night
from tests.support.deployments.server import Server

NUM_BUSY = 4
BUSY = "while True: pass"
# A step takes longer than the silence after which a target is left, and has a core to fight for.
STEP_S, COMPUTED_S, NUM_STRETCHED = 4.5, 0.5, 2
HOUR_S = 3600.0
BODY = {"prompt": "abc abc abc", "temperature": 0.7, "seed": 3, "ignore_eos": True}


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nobody is left or at fault meanwhile: there is no warning."""
    with caplog.at_level(logging.WARNING):
        yield
    ours = [each for each in caplog.records if each.name.startswith(("cluster", "deployments"))]
    assert [each.getMessage() for each in ours] == []


@contextmanager
def busy_processes() -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(NUM_BUSY)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def read(server: Server, then: Callable[[int], Any] = lambda place: None, **body: Any) -> str:
    """A streamed text, which may take a minute; `then` is called after each of its pieces."""
    text, headers = "", {"x-request-timeout-ms": "60000"}
    for place, event in enumerate(server.read("/v1/completions", headers, **BODY, **body)):
        text += event["choices"][0]["text"]
        then(place)
    return text


@by_night
def test_steps_longer_than_a_silence_on_shared_cores_leave_nobody(
    server: Server, quiet: None, monkeypatch: pytest.MonkeyPatch
):
    expected = read(server, max_tokens=2)
    plain, states = Engine.step, []

    def stretched(engine: Engine, *arguments: Any, **options: Any) -> list[Output]:
        if len(states) == NUM_STRETCHED:
            return plain(engine, *arguments, **options)
        until, computed_s = time.monotonic() + STEP_S, time.thread_time() + COMPUTED_S
        while time.thread_time() < computed_s:
            pass
        time.sleep(max(until - time.monotonic(), 0.0))
        states.append(server.coordinator.status()["targets"])
        return plain(engine, *arguments, **options)

    with busy_processes(), monkeypatch.context() as patch:
        patch.setattr(Engine, "step", stretched)
        assert read(server, max_tokens=2) == expected
    assert len(states) == NUM_STRETCHED
    assert all(len(each) == 1 for each in states)


def test_a_wall_clock_that_jumps_ends_no_text_and_no_time(
    server: Server, quiet: None, monkeypatch: pytest.MonkeyPatch
):
    """Forward and back by an hour, as when a machine's clock is set while it serves."""
    asked = {"max_tokens": 60, "speculation": {"enabled": False}}
    expected = read(server, **asked)
    real, real_ns, offset = time.time, time.time_ns, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + offset[0])
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(1e9 * offset[0]))
    jumps = {3: HOUR_S, 9: -HOUR_S, 15: 0.0}

    def jump(place: int) -> None:
        offset[0] = jumps.get(place, offset[0])

    assert read(server, jump, **asked) == expected
    for offset[0] in (HOUR_S, -HOUR_S):
        assert read(server, **asked) == expected
    assert len(server.coordinator.status()["targets"]) == 1
