"""A target that stops without a word while it serves streams: the texts go on elsewhere."""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest

from tests.deployments.conftest import MODEL, Served, arguments, places, wait_until

APPLICATION = "spare"
NUM_STREAMS = 4
# The whole pause: until the silence is noticed, with the default of `coordinator.target_silence_s`,
# and until the text has been rebuilt elsewhere.
MAX_PAUSE_S = 10.0


@dataclass(slots=True)
class Stream:
    """texts: of its chunks.  times: when they came."""

    texts: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def longest_pause_s(self) -> float:
        return max(b - a for a, b in zip(self.times, self.times[1:], strict=False))


@pytest.fixture(scope="module")
def spare(served: Served, long_folder: Path, long_draft_folder: Path) -> Iterator[Served]:
    """An application with two targets, beside the one of the other tests."""
    from ray import serve

    from deployments.app import build

    wanted = copy.deepcopy(arguments(long_folder, long_draft_folder))
    wanted["target"]["replicas"] = 2
    del wanted["drafters"]["lm"]
    serve.run(build(wanted), name=APPLICATION, route_prefix=f"/{APPLICATION}")
    found = replace(served, http=f"{served.proxied}/{APPLICATION}")
    wait_until(lambda: found.health()["targets"] == 2)
    yield found
    serve.delete(APPLICATION)


def read(served: Served, number: int, stream: Stream) -> str:
    body = {
        "model": MODEL, "prompt": f"abc {number} abc", "max_tokens": 800, "temperature": 0.7,
        "seed": number, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    with httpx.stream("POST", f"{served.http}/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk
            stream.times.append(time.monotonic())
            stream.texts.append(chunk["choices"][0]["text"])
    return "".join(stream.texts)


def streamed(served: Served, disturb: Callable[[], None]) -> tuple[list[str], float]:
    """The texts of some streams at once, and the longest pause; `disturb` is called when every one
    of them has begun."""
    streams = [Stream() for _ in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(read, served, *each) for each in enumerate(streams)]
        wait_until(lambda: all(len(each.texts) >= 10 for each in streams))
        disturb()
        texts = [each.result() for each in running]
    return texts, max(each.longest_pause_s for each in streams)


@contextmanager
def resumed_afterwards(pids: list[int]) -> Iterator[None]:
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_a_stopped_target_costs_a_pause_within_the_deadline_and_not_the_texts(
    spare: Served,
) -> None:
    undisturbed, _ = streamed(spare, lambda: None)
    stopped = places("target", APPLICATION)[0]["pid"]
    with resumed_afterwards([stopped]):
        texts, pause_s = streamed(spare, lambda: os.kill(stopped, signal.SIGSTOP))
        assert spare.health()["targets"] == 1
    assert texts == undisturbed
    assert spare.metric("drafthouse_failovers_total") >= 1
    assert 1.0 < pause_s < MAX_PAUSE_S
    # It is used again when it speaks again.
    wait_until(lambda: spare.health()["targets"] == 2)


def test_the_only_target_is_left_when_it_stops_and_taken_back_when_it_goes_on(
    served: Served,
) -> None:
    undisturbed, _ = streamed(served, lambda: None)
    (stopped,) = served.pids("target")

    def stop() -> None:
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: served.health()["targets"] == 0)
        os.kill(stopped, signal.SIGCONT)

    with resumed_afterwards([stopped]):
        texts, _ = streamed(served, stop)
    assert texts == undisturbed
    assert served.pids("target") == [stopped]
