"""Two of everything: each process is killed while texts are written, and no text changes."""

from __future__ import annotations

import copy
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.client import Client
from cluster.core import SpeculationOptions
from cluster.rpc.codec_generation import REQUEST
from cluster.rpc.generation import GenerationRequest, SamplingOptions
from tests.deployments.conftest import (
    MODEL,
    Served,
    arguments,
    free_port,
    places,
    wait_until,
)
from tests.deployments.test_silence import resumed_afterwards

APPLICATION = "many"
NUM_WRITERS = 4
NUM_TOKENS = 120
DRAFTERS = ("lookup", "ngram", "suffix")


@pytest.fixture(scope="module")
def many(served: Served, long_folder: Path, long_draft_folder: Path) -> Iterator[Served]:
    """Two ingresses, coordinators and targets, and three drafters, beside the other application."""
    from ray import serve

    from deployments.app import build

    wanted = copy.deepcopy(arguments(long_folder, long_draft_folder))
    port = free_port()
    wanted |= {"grpc": {"port": port}}
    for part in ("target", "coordinator", "ingress"):
        wanted[part]["replicas"] = 2
    del wanted["drafters"]["lm"]
    wanted["drafters"]["suffix"]["placement"] = {"num_cpus": 0.1}
    serve.run(build(wanted), name=APPLICATION, route_prefix=f"/{APPLICATION}")
    found = replace(served, http=f"{served.proxied}/{APPLICATION}", own_grpc=f"127.0.0.1:{port}")
    wait_until(lambda: is_whole(found))
    yield found
    serve.delete(APPLICATION)


def is_whole(many: Served) -> bool:
    """True if everything is there, as every ingress sees it."""
    for _ in range(4):  # whichever answers
        try:
            state = many.health()
        except (httpx.HTTPError, ValueError):
            return False  # one of them was just killed
        if (state["coordinators"], state["targets"]) != (2, 2):
            return False
        if state["drafters"] != dict.fromkeys(DRAFTERS, 1):
            return False
    return True


def labels_of(many: Served, name: str, label: str) -> list[str]:
    """The label of each series of that name."""
    page = httpx.get(f"{many.http}/metrics", timeout=30).text
    return re.findall(f'^{name}{{.*\\b{label}="([^"]*)"', page, re.MULTILINE)


def asked(seed: int, *, speculates: bool = True) -> Any:
    sampling = SamplingOptions(temperature=0.7, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
    request = GenerationRequest(
        MODEL, f"abc {seed} abc", sampling=sampling,
        speculation=SpeculationOptions(enabled=speculates),
    )  # fmt: skip
    return REQUEST.encode(request)


def written(client: Client, seed: int, *, speculates: bool = True) -> str:
    return client.complete(asked(seed, speculates=speculates), timeout_s=120).choices[0].text


@dataclass
class Writers:
    """Threads that ask for texts again and again, each with a connection of its own."""

    address: str
    expected: Sequence[str]
    counts: Counter[int] = field(default_factory=Counter)
    is_over: threading.Event = field(default_factory=threading.Event)

    def write(self, number: int) -> None:
        while not self.is_over.is_set():
            with Client(self.address, max_retries=20) as client:
                assert written(client, number) == self.expected[number]
            self.counts[number] += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            writing = [pool.submit(self.write, number) for number in range(NUM_WRITERS)]
            try:
                yield
            finally:
                self.is_over.set()
            for each in writing:
                each.result()

    def wait(self) -> None:
        """Until the texts that are written now have ended."""
        before = self.counts.copy()
        wait_until(lambda: all(self.counts[each] > before[each] for each in range(NUM_WRITERS)))


def test_texts_and_steps_count_once(many: Served) -> None:
    """Plain texts draw one token for each of their sequences in each step."""
    with Client(many.own_grpc) as client, ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda seed: written(client, seed, speculates=False), range(8)))
    assert len(set(texts)) == 8
    wait_until(lambda: many.metric("drafthouse_batch_size_sum") == 8 * NUM_TOKENS)
    assert many.metric("drafthouse_output_tokens_total") == 8 * NUM_TOKENS
    assert many.metric("drafthouse_requests_total", finish_reason="length") == 8
    # Both coordinators had requests; both targets had texts, whose steps one coordinator counts.
    assert len(labels_of(many, "drafthouse_requests_total", "process")) == 2
    targets = labels_of(many, "drafthouse_target_steps_total", "target")
    assert len(targets) == len(set(targets)) == 2


def test_texts_of_a_coordinator_that_stops_without_a_word_go_on_at_the_other(
    many: Served,
) -> None:
    with Client(many.own_grpc) as client:
        expected = [written(client, number) for number in range(NUM_WRITERS)]
    stopped = places("coordinator", APPLICATION)[0]["pid"]
    writers = Writers(many.own_grpc, expected)
    with resumed_afterwards([stopped]), writers.running():
        writers.wait()
        os.kill(stopped, signal.SIGSTOP)
        writers.wait()
        writers.wait()
    wait_until(lambda: is_whole(many))
    assert stopped in [place["pid"] for place in places("coordinator", APPLICATION)]


def test_each_process_may_be_killed_while_texts_are_written(many: Served) -> None:
    with Client(many.own_grpc) as client:
        expected = [written(client, number) for number in range(NUM_WRITERS)]
    parts = [places(part, APPLICATION) for part in ("ingress", "coordinator", "target")]
    drafters = [place for name in DRAFTERS for place in places(f"drafter-{name}", APPLICATION)]
    kill_while_writing(many, expected, [*(first for first, _ in parts), *drafters])
    # Their successors are to do without the others now.
    wait_until(lambda: is_whole(many))
    assert many.metric("drafthouse_target_up") == 2 * 2
    assert many.metric("drafthouse_requests_total", finish_reason="error") == 0
    assert set(Counter(labels_of(many, "drafthouse_target_steps_total", "target")).values()) == {1}
    kill_while_writing(many, expected, [second for _, second in parts])


def kill_while_writing(
    many: Served, expected: Sequence[str], victims: Sequence[dict[str, Any]]
) -> None:
    writers = Writers(many.own_grpc, expected)
    with writers.running():
        writers.wait()
        for victim in victims:
            os.kill(victim["pid"], signal.SIGKILL)
            writers.wait()
