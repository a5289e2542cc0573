"""Two of everything: texts and steps are counted once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

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
    wait_until,
)
from tests.support.deployments.metrics import samples

APPLICATION = "many"
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


def written(client: Client, seed: int) -> str:
    """A text that is written without drafts."""
    sampling = SamplingOptions(temperature=0.7, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
    request = GenerationRequest(
        MODEL, f"abc {seed} abc", sampling=sampling,
        speculation=SpeculationOptions(enabled=False),
    )  # fmt: skip
    return client.complete(REQUEST.encode(request), timeout_s=120).choices[0].text


def test_texts_and_steps_count_once(many: Served) -> None:
    """Plain texts draw one token for each of their sequences in each step."""
    names = ("batch_size_sum", "output_tokens_total", "requests_total")

    def counted() -> list[float]:
        return [many.metric(f"drafthouse_{name}") for name in names]

    before = counted()
    with Client(many.own_grpc) as client, ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda seed: written(client, seed), range(8)))
    assert len(set(texts)) == 8
    new = [8 * NUM_TOKENS, 8 * NUM_TOKENS, 8]
    wait_until(lambda: [now - then for now, then in zip(counted(), before, strict=True)] == new)
    # Both coordinators had requests; both targets had texts, whose steps one coordinator counts.
    assert len(samples(many.http, "drafthouse_requests_total")) == 2
    targets = [
        labels["target"] for labels, _ in samples(many.http, "drafthouse_target_steps_total")
    ]
    assert len(targets) == len(set(targets)) == 2
