"""What a key and a class may have: what is beyond it is refused in shape; others do not see it."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from cluster.config.schema import Config, CoordinatorConfig, IngressConfig
from cluster.metrics import KEY_TOKENS
from tests.support.deployments.place import Place, generate, held, place, refusal
from tests.support.errors import config_error

PATH = "/v1/completions"
Write = Callable[..., Config]


async def statuses(here: Place, key: str, count: int, **fields: Any) -> list[int]:
    return [(await here.ask(PATH, key=key, **fields)).status_code for _ in range(count)]


async def test_requests_a_minute_are_each_keys_own(write: Write):
    config = write(alice={"requests_per_minute": 2}, bob={"requests_per_minute": 1})
    async with place(config) as here, here.listening() as (channel, _):
        assert await statuses(here, "alice", 2) == [200, 200]
        late = await here.ask(PATH, key="alice", stream=True)
        assert refusal(late) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert 1 <= int(late.headers["retry-after"]) <= 60
        assert "key alice: its share of 2 requests a minute" in late.json()["error"]["message"]
        refused = generate(channel, "alice")
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert float(dict(await refused.trailing_metadata())["drafthouse-retry-after-s"]) >= 1
        assert await statuses(here, "bob", 2) == [200, 429]
        assert len([each for frame in here.toy.frames for each in frame.opens]) == 3


async def test_tokens_of_prompts_and_outputs_count(write: Write):
    async with place(write(alice={"tokens_per_minute": 30})) as here:
        ten = {"prompt": list(range(1, 11)), "max_tokens": 4, "ignore_eos": True}
        assert await statuses(here, "alice", 2, **ten) == [200, 200]
        await here.rooms.settle()  # the output is counted when the answer has gone
        assert await statuses(here, "alice", 1, **ten) == [429]
        too_long = await here.ask(PATH, key="alice", **{**ten, "prompt": [1] * 31})
        assert refusal(too_long) == (413, "invalid_request_error", "request_too_large")
        assert await statuses(here, "alice", 2, prompt=[1], max_tokens=1) == [200, 429]


async def test_a_minute_is_over_after_a_minute_though_the_wall_clock_was_set_back(
    write: Write, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("time.time", lambda: 0.0)
    began, passed = time.monotonic(), 0.0
    async with place(write(alice={"requests_per_minute": 1})) as here:
        here.ingress._quotas._clock = lambda: began + passed
        assert await statuses(here, "alice", 2) == [200, 429]
        passed = 59.0
        assert await statuses(here, "alice", 1) == [429]
        passed = 60.0
        assert await statuses(here, "alice", 2) == [200, 429]


async def test_requests_at_a_time_are_bounded(write: Write):
    async with place(write(alice={"concurrent_requests": 2}, bob={})) as here:
        # What is refused later on does not keep its place.
        assert await statuses(here, "alice", 3, prompt="x" * 10**6) == [400] * 3
        here.toy.gate.clear()
        running = [here.ask(PATH, key="alice", stream=True) for _ in range(2)]
        await here.wait_for_running(2)
        assert refusal(await here.ask(PATH, key="alice"))[0] == 429
        running.append(here.ask(PATH, key="bob"))
        await here.wait_for_running(3)
        here.toy.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 3
        assert await statuses(here, "alice", 1) == [200]


async def test_a_class_has_limits_for_all_keys_together(write: Write):
    both = {"classes": ["interactive", "throughput"]}
    limits = {"interactive": {"requests_per_minute": 2}}
    async with place(write(limits, alice=both, bob=both)) as here:
        fast = {"speculation": {"latency_class": "interactive"}}
        assert await statuses(here, "alice", 1, **fast) == [200]
        assert await statuses(here, "bob", 2, **fast) == [200, 429]
        assert await statuses(here, "bob", 1) == [200]


async def test_ingress_processes_share_a_limit(write: Write):
    config = write(alice={"requests_per_minute": 5})
    config = replace(config, ingress=IngressConfig(replicas=2))
    async with place(config) as here:
        assert await statuses(here, "alice", 4) == [200, 200, 200, 429]


async def test_a_deadline_holds_in_the_queue():
    crowded = held(max_running_sequences=1)
    async with crowded as here, here.listening() as (channel, _):
        first = here.ask(PATH)
        await here.wait_for_running(1)
        late = await here.ask(PATH, headers={"x-request-timeout-ms": "30"})
        assert refusal(late) == (504, "timeout_error", "deadline_exceeded")
        late = generate(channel, timeout=0.05)
        assert await late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(20):
            while here.rooms.coordinator.status()["num_waiting"]:
                await here.rooms.settle()
        here.toy.gate.set()
        assert (await first).status_code == 200


async def test_classes_and_limits_change_under_the_keys(write: Write):
    config = write({"batch": {"requests_per_minute": 1}}, alice={"classes": ["batch"]})
    classes = {"latency_classes": {"batch": 0.5}}
    config = replace(config, coordinator=CoordinatorConfig(**classes))
    async with place(config, **classes) as here:
        other = {"throughput": 1.0}
        wrong = replace(here.ingress.config, coordinator=CoordinatorConfig(latency_classes=other))
        with config_error("'batch' is no class"):
            await here.ingress.use(wrong)
        assert here.ingress.config.coordinator.latency_classes == {"batch": 0.5}
        assert await statuses(here, "alice", 1, n=2) == [200]
        limits = replace(here.ingress.config.ingress, max_choices=1)
        await here.ingress.use(replace(here.ingress.config, ingress=limits))
        assert await statuses(here, "alice", 1, n=2) == [400]
        assert await statuses(here, "alice", 1) == [200]
        here.ingress.refuse_config("a reason")
        assert (await here.ingress.health())["refused"] == {"ingress.user_config": "a reason"}


async def test_tokens_are_counted_under_the_names_of_keys(
    write: Write, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("deployments.ingress.keys.MAX_NAMES", 2)
    async with place(write(a={}, b={}, c={}, d={})) as here:
        used = Counter[tuple[str, str]]()
        for key in ("a", "b", "a", "c", "d"):
            usage = (await here.ask(PATH, key=key, ignore_eos=True)).json()["usage"]
            name = key if key in ("a", "b") else "(other)"
            used[name, "prompt"] += usage["prompt_tokens"]
            used[name, "output"] += usage["completion_tokens"]
            used[name, "cached"] += usage["prompt_tokens_details"]["cached_tokens"]
        refused = await here.ask(PATH, key="a", max_tokens=-1)
        assert refused.status_code == 400
        found = {
            (sample.labels["key"], sample.labels["kind"]): sample.value
            for family in here.ingress.recorder.registry.collect()
            for sample in family.samples
            if sample.name == f"{KEY_TOKENS.name}_total"
        }
        assert found == dict(used)
        assert used["a", "output"] > used["b", "output"] > 0


async def test_without_keys_there_is_nobody_to_count_for():
    async with place() as here:
        assert (await here.ask(PATH)).status_code == 200
        assert f"{KEY_TOKENS.name}_total{{" not in here.ingress.recorder.render().decode()
