"""Two of everything: texts and steps are counted once."""

from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.deployments.conftest import wait_until
from tests.nodes.conftest import Cluster
from tests.support.deployments.api import MODEL
from tests.support.deployments.metrics import metric, samples

NUM_TEXTS, NUM_TOKENS = 8, 120


def written(url: str, seed: int) -> str:
    """A text that is written without drafts."""
    body = {
        "model": MODEL,
        "prompt": f"abc {seed} abc",
        "temperature": 0.7,
        "seed": seed,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "speculation": {"enabled": False},
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()
    return answer.json()["choices"][0]["text"]


def test_texts_and_steps_count_once(cluster: Cluster):
    """Plain texts draw one token for each of their sequences in each step."""
    url = cluster.url()
    names = ("batch_size_sum", "output_tokens_total", "requests_total")

    def counted() -> list[float]:
        return [metric(url, f"drafthouse_{name}") for name in names]

    before = counted()
    with ThreadPoolExecutor(NUM_TEXTS) as pool:
        texts = list(pool.map(lambda seed: written(url, seed), range(NUM_TEXTS)))
    assert len(set(texts)) == NUM_TEXTS
    new = [NUM_TEXTS * NUM_TOKENS, NUM_TEXTS * NUM_TOKENS, NUM_TEXTS]
    wait_until(lambda: [now - then for now, then in zip(counted(), before, strict=True)] == new)
    # Both coordinators had requests; both targets had texts, whose steps one coordinator counts.
    assert len(samples(url, "drafthouse_time_to_first_token_seconds_count")) == 2
    targets = [labels["target"] for labels, _ in samples(url, "drafthouse_target_steps_total")]
    assert len(targets) == len(set(targets)) == 2
