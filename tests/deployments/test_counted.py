"""Counted is what was told: usage, /metrics, /stats and the keys' accounts agree exactly.

DRAFTHOUSE_COUNTED says over how many mixed requests.
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest

from cluster.metrics import KEY_TOKENS, REJECTED, REQUESTS, vllm_metrics
from deployments.metrics_reader import Page
from tests.support.deployments.api import Json, events
from tests.support.deployments.place import bearer, write_keys
from tests.support.deployments.server import MODEL, Server, serving, tiny_config

NUM_REQUESTS = int(os.environ.get("DRAFTHOUSE_COUNTED", "10"))
KEYS = ("alice", "bob")
PATIENCE_S = 60.0
PROMPTS = (
    "a, b, c, d, e, f, a, b, c, d, e, f, a, b,",
    "The cat sat on the mat. The cat sat",
    "xyz",
)
# The columns of every count.
KINDS = ("prompt", "cached", "output", "requests")
Counts = Counter[str]


@pytest.fixture(scope="module")
def server(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = {name: Json() for name in KEYS}
    access = write_keys(tmp_path_factory.mktemp("keys") / "keys.yaml", **keys)
    with serving(replace(tiny_config(llama_folder), access=access)) as running:
        yield running


@dataclass(frozen=True)
class Asked:
    """path, body: the request.  how: whole, streamed, or cancelled in the middle of its stream."""

    body: Json
    path: str = "/v1/completions"
    how: str = "whole"
    key: str = "alice"


@dataclass
class Said:
    """An answer.  usage: None where there was none.  stats: its speculative_decoding."""

    status: int
    usage: Json | None = None
    stats: Json = field(default_factory=dict)


def counts(server: Server) -> dict[str, Counts]:
    """What was counted so far, by who says it: our names, vLLM's, /stats, and each key."""
    text = server.run(server.ingress.render_metrics()).decode()
    page, stats = Page.read(text), server.run(server.ingress.stats())

    def total(name: str) -> int:
        return _whole(page.total(name) or 0.0)

    found = {
        "drafthouse": Counts(
            prompt=total("drafthouse_prompt_tokens_total"),
            cached=total("vllm:prompt_tokens_cached_total"),
            output=total("drafthouse_output_tokens_total"),
            requests=total(f"{REQUESTS.name}_total"),
        ),
        "vllm": Counts(
            prompt=total("vllm:prompt_tokens_total"),
            cached=total("vllm:prefix_cache_hits_total"),
            output=total("vllm:generation_tokens_total"),
            requests=total("vllm:request_success_total"),
        ),
        "histograms": Counts(
            prompt=total(f"{vllm_metrics.REQUEST_PROMPT_TOKENS.name}_sum"),
            output=total(f"{vllm_metrics.REQUEST_GENERATION_TOKENS.name}_sum"),
        ),
        "stats": Counts(
            prompt=stats["tokens"]["prompt"],
            cached=stats["tokens"]["prompt_cached"],
            output=stats["tokens"]["generation"],
            requests=sum(stats["requests"]["finished"].values()),
        ),
        "rejected": Counts(requests=total(f"{REJECTED.name}_total")),
    }
    assert all(type(count) is int for each in found.values() for count in each.values())
    for key in KEYS:
        by_kind = {
            dict(labels)["kind"]: _whole(value)
            for labels, value in page.samples.get(f"{KEY_TOKENS.name}_total", {}).items()
            if dict(labels)["key"] == key
        }
        found[key] = Counts(by_kind)
    return found


def _whole(value: float) -> int:
    assert value == int(value)
    return int(value)


def ask(server: Server, asked: Asked) -> Said:
    body = {"model": MODEL, "temperature": 0, **asked.body}
    if asked.how != "whole":
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers, url = bearer(asked.key), f"{server.url}{asked.path}"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE_S) as answer:
        if asked.how == "cancelled":
            next(line for line in answer.iter_lines() if line.startswith("data: {"))
            return Said(200)
        text = answer.read().decode()
    if answer.status_code != 200:
        return Said(answer.status_code)
    found = events(text) if asked.how == "streamed" else [json.loads(text)]
    (last,) = (each for each in found if each.get("usage"))
    return Said(200, last["usage"], last["metrics"]["speculative_decoding"])


def usage_of(usage: Json) -> Counts:
    """In the words of any endpoint."""
    if "prompt_tokens" in usage:
        details = usage["prompt_tokens_details"]["cached_tokens"]
        return Counts(
            prompt=usage["prompt_tokens"], cached=details, output=usage["completion_tokens"]
        )
    if "input_tokens_details" in usage:
        cached, prompt = usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
    else:  # Anthropic's input tokens are those that were not in the cache
        cached = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + cached
    return Counts(prompt=prompt, cached=cached, output=usage["output_tokens"])


def check(server: Server, asked: Asked) -> None:
    """Ask, and compare what has been counted since with what the answer says."""
    before = counts(server)
    said = ask(server, asked)

    def grown() -> dict[str, Counts]:
        now = counts(server)
        return {who: Counts({k: now[who][k] - before[who][k] for k in KINDS}) for who in now}

    new = grown()
    deadline = time.monotonic() + PATIENCE_S
    while not new["drafthouse"]["requests"] + new["rejected"]["requests"]:
        assert time.monotonic() < deadline, "nobody has counted it"
        new = grown()
    context = f"{asked}: {said}, {new}"
    others = ("vllm", "stats", "histograms", asked.key)
    for kind in ("prompt", "cached", "output"):
        for who in others:
            if (who, kind) != ("histograms", "cached"):
                assert new[who][kind] == new["drafthouse"][kind], context
    assert new["vllm"] == new["stats"] == new["drafthouse"], context
    assert not any(new[key].total() for key in KEYS if key != asked.key), context
    if said.status != 200:
        assert new["rejected"]["requests"] == 1, context
        assert not new["drafthouse"].total(), context
        return
    assert (new["drafthouse"]["requests"], new["rejected"]["requests"]) == (1, 0), context
    if said.usage is not None:
        told = usage_of(said.usage)
        assert {kind: new["drafthouse"][kind] for kind in told} == dict(told), context
    if said.stats:
        accepted = said.stats["num_accepted_draft_tokens"]
        histogram = said.stats["acceptance_histogram"]
        assert accepted <= max(new["drafthouse"]["output"] - 1, 0), context
        assert accepted == sum(k * count for k, count in enumerate(histogram)), context
        assert accepted == sum(said.stats["accepted_by_drafter"].values()), context


STOP = {"prompt": PROMPTS[0], "max_tokens": 40, "ignore_eos": True}
BEAMS = {"prompt": PROMPTS[1], "max_tokens": 8, "n": 2, "best_of": 3, "use_beam_search": True}
SCORED = {"prompt": PROMPTS[1], "max_tokens": 0, "echo": True, "logprobs": 1}


@pytest.fixture(scope="module")
def stop(server: Server) -> str:
    """A character in the middle of what the model writes, which drafts reach."""
    asked = {"model": MODEL, "temperature": 0, **STOP}
    answer = httpx.post(f"{server.url}/v1/completions", json=asked, headers=bearer("alice"))
    text = answer.json()["choices"][0]["text"]
    found = [char for char in text if char.isascii() and char.isprintable()]
    return str(found[len(found) // 2])


def mixed(count: int, stop: str) -> Iterator[Asked]:
    """Requests of all kinds, with what may be combined."""
    rng = random.Random(14)
    answered = ("whole", "streamed")
    message = {"messages": [{"role": "user", "content": PROMPTS[1]}]}
    chat = {
        "/v1/chat/completions": {**message, "max_tokens": 9, "stop": [stop]},
        "/v1/messages": {**message, "max_tokens": 9, "stop_sequences": [stop]},
        "/v1/responses": {"input": PROMPTS[1], "max_output_tokens": 9, "store": False},
    }
    kinds = [
        lambda: Asked({"stop": [stop], "n": rng.randint(1, 3)}, how=rng.choice(answered)),
        lambda: Asked({"best_of": 3, "temperature": 1, "stop": [stop]}),
        lambda: Asked(BEAMS | {"max_tokens": rng.randint(1, 8)}),
        lambda: Asked(SCORED | {"max_tokens": rng.randint(0, 4)}),
        lambda: Asked({"prompt_logprobs": rng.randint(0, 2), "n": rng.randint(1, 2)}),
        lambda: Asked({"prompt": rng.sample(PROMPTS, 2), "n": 2}, how="streamed"),
        lambda: Asked({"max_tokens": rng.randint(60, 400), "ignore_eos": True}, how="cancelled"),
        lambda: Asked({"prompt": PROMPTS[2], "max_tokens": 0, "echo": True}),
        lambda: Asked({"n": 0}),
        lambda: Asked(*reversed(rng.choice(list(chat.items())))),
    ]
    for number in range(count):
        asked = kinds[number % len(kinds)]()
        body = asked.body
        if asked.path == "/v1/completions":
            usual = {"prompt": rng.choice(PROMPTS), "max_tokens": rng.randint(1, 24)}
            body = {**usual, "seed": rng.randint(0, 9), **body}
        yield replace(asked, body=body, key=rng.choice(KEYS))


def test_all_counts_agree_over_mixed_requests(server: Server, stop: str):
    for asked in mixed(NUM_REQUESTS, stop):
        check(server, asked)
