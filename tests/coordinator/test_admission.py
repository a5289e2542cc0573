"""Who is let in, who waits, and who is told to come back."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.config.schema import Config
from cluster.coordinator.admission import with_law
from cluster.coordinator.coordinator import Coordinator
from cluster.core import (
    Request,
    SamplingParams,
    SpeculationOptions,
    token_array,
)
from cluster.errors import (
    CapacityError,
    DrafthouseError,
    NotFoundError,
    RequestError,
    TooLargeError,
    UnavailableError,
)
from cluster.requests.fields import BeamSpec
from cluster.rpc.messages import Open
from cluster.spec.token_log import prefix_hash
from tests.support.coordinator.house import (
    GREEDY,
    SEEDED,
    at_work,
    collect,
    house,
    request,
    text_of,
)
from tests.support.coordinator.toys import ToyTarget, plain_text
from tests.support.rpc.frames_strategy import same

SAMPLED = replace(GREEDY, temperature=0.7)
REJECTION = SpeculationOptions(law="rejection")
CLASHES = {
    "prediction": {"prediction": (3, 4)},
    "forced_ids": {"forced_ids": (1,) * GREEDY.max_tokens},
    "beams": {"beams": BeamSpec(2)},
}


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (request([]), RequestError, "no tokens"),
        (request([1] * 64), RequestError, "64 tokens.*64.*max_context_len"),
        (request([1, 32]), RequestError, "prompt names token 32; the vocabulary is 0..31"),
        (request([1, -1]), RequestError, "prompt names token -1"),
        (request(params=replace(GREEDY, max_tokens=0)), RequestError, "max_tokens is 0"),
        (request(params=replace(GREEDY, prediction=(3, 41))), RequestError, "token 41"),
        (
            request(speculation=SpeculationOptions(drafters=("z",))),
            NotFoundError,
            "'z'; served are: a, b",
        ),
        (
            request(speculation=SpeculationOptions(max_draft_tokens=-1)),
            RequestError,
            "max_draft_tokens is -1",
        ),
        (
            request(speculation=SpeculationOptions(latency_class="urgent")),
            NotFoundError,
            "'urgent'; served are: throughput, interactive",
        ),
        (
            request(speculation=SpeculationOptions(law="multi_step")),
            RequestError,
            r"law is 'multi_step'; allowed: coupled, rejection \(coordinator.laws\)",
        ),
        (
            request(speculation=SpeculationOptions(law="block")),  # type: ignore[arg-type]
            RequestError,
            "law is 'block'; rejection accepts as many drafts, so name that",
        ),
        *(
            (
                request(params=replace(SAMPLED, **given), speculation=REJECTION),
                RequestError,
                f"law is rejection, which does not go with {name}; remove one of both",
            )
            for name, given in CLASHES.items()
        ),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_value_before_any_work(
    asked: Request, error: type[DrafthouseError], message: str
):
    target = ToyTarget()
    async with house(laws=("coupled", "rejection")) as stage:
        stage.add_target(target, max_context_len=64)
        with pytest.raises(error, match=message) as raised:
            await collect(stage.coordinator, asked)
        assert raised.value.param, "no field is named"
        assert target.frames == []
        assert stage.status()["num_running"] == 0


def test_the_first_law_is_that_of_requests_that_name_none_and_can_have_it():
    laws = ("rejection", "coupled")

    assert with_law(request(params=SAMPLED), laws).params.law == "rejection"
    assert with_law(request(speculation=SpeculationOptions(law="coupled")), laws).params.is_coupled
    for given in CLASHES.values():
        assert with_law(request(params=replace(SAMPLED, **given)), laws).params.law == "coupled"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request([1] * 9000), "prompt has 9000 .*max_frame_bytes"),
        (
            request([1] * 100, replace(GREEDY, prediction=(1,) * 8100)),
            "prediction has 8100 .* prompt 100",
        ),
        (
            request([1] * 100, replace(GREEDY, max_tokens=4047, forced_ids=(1,) * 4047)),
            "forced_ids has 4047 .* prompt 100",
        ),
    ],
)
async def test_what_no_frame_can_carry_is_too_large(asked: Request, message: str):
    async with house(max_frame_bytes=65536) as stage:
        stage.add_target(ToyTarget(), max_context_len=0)
        with pytest.raises(TooLargeError, match=message) as raised:
            await collect(stage.coordinator, asked)
        assert message.startswith(str(raised.value.param))


async def test_an_id_that_is_running_is_refused():
    target = ToyTarget(is_held=True)
    async with at_work(target) as stage:
        running = stage.begin()
        await target.wait_for_frames(1)
        with pytest.raises(RequestError, match="is running already"):
            await stage.ask()
        target.gate.set()
        await running


async def fill(stage: Any, count: int) -> list[asyncio.Task[Any]]:
    tasks = [stage.begin(id=f"r{i}") for i in range(count)]
    await stage.settle(30)
    return tasks


async def test_beyond_the_running_requests_wait_and_beyond_the_queue_are_sent_away():
    target = ToyTarget(is_held=True)
    async with at_work(target, max_running_sequences=2, max_queued_requests=3) as stage:
        tasks = await fill(stage, 5)
        for resumed in ([], [7]):  # a continued request queues like any other
            with pytest.raises(CapacityError, match="max_queued_requests") as refused:
                await stage.ask(id="late", output_ids=token_array(resumed))
            assert refused.value.retry_after_s >= 1.0
        metrics = stage.metrics()
        assert "drafthouse_running_requests 2.0" in metrics
        assert "drafthouse_queued_requests 3.0" in metrics
        target.gate.set()
        await asyncio.gather(*tasks)
    assert [opened.request_id for opened in target.opens] == [f"r{i}" for i in range(5)]


async def test_a_request_that_was_admitted_is_let_in_before_all_others_of_a_full_line():
    target = ToyTarget(is_held=True)
    async with at_work(target, max_running_sequences=1, max_queued_requests=1) as stage:
        tasks = [stage.begin(params=SEEDED), stage.begin(id="next")]
        await stage.settle(30)
        stage.clock.now += 1.0
        whole = plain_text([1, 2, 3], SEEDED)
        known = token_array(whole[:2])
        resumed = request(params=SEEDED, id="resumed", output_ids=known, was_admitted=True)
        tasks.append(asyncio.create_task(collect(stage.coordinator, resumed)))
        target.gate.set()
        first, _, rest = await asyncio.gather(*tasks)
    assert [opened.request_id for opened in target.opens] == ["r", "resumed", "next"]
    assert text_of(first) == whole
    assert rest[0].position == 2
    assert [token for event in rest for token in event.token_ids.tolist()] == whole[2:]


async def test_without_a_queue_a_free_place_still_lets_in():
    target = ToyTarget()
    async with at_work(
        target, drafters=(), max_running_sequences=1, max_queued_requests=0
    ) as stage:
        running = stage.begin()
        await target.wait_for_steps(1)
        with pytest.raises(CapacityError, match="1 requests are running and 0 are waiting"):
            await stage.ask(id="late")
        (*_, last) = await running
    assert last.stats.idle_because == "no_drafter_for_model"


async def test_a_targets_own_limit_holds_and_two_targets_share_the_load():
    async with house(drafters=()) as stage:
        toys = [ToyTarget(is_held=True), ToyTarget(is_held=True)]
        for index, toy in enumerate(toys):
            stage.add_target(toy, f"t{index}", max_running_sequences=2)
        tasks = await fill(stage, 5)
        assert [t["sessions"] for t in stage.status()["targets"]] == [2, 2]
        assert stage.status()["num_waiting"] == 1
        for toy in toys:
            toy.gate.set()
        await asyncio.gather(*tasks)


async def test_without_any_target_requests_wait_for_the_timeout_and_no_longer():
    async with house(target_timeout_s=30.0) as stage:
        waiting = stage.begin(error=UnavailableError.code)
        await stage.settle(5)
        stage.clock.now += 29.0
        stage.coordinator.tick()
        assert stage.status()["num_waiting"] == 1
        stage.clock.now += 1.0
        stage.coordinator.tick()
        await waiting


async def test_a_request_that_came_before_the_first_target_is_served_by_it():
    async with house() as stage:
        waiting = stage.begin()
        too_long = stage.begin([1] * 100, id="long", error=RequestError.code)
        await stage.settle(5)
        stage.add_target(ToyTarget(), max_context_len=80)
        await waiting
        await too_long


async def test_a_text_is_opened_once_with_its_params_and_where_it_ends():
    params = SamplingParams(max_tokens=6, seed=4)
    target = ToyTarget()
    async with at_work(target, drafters=()) as stage:
        await stage.ask(params=params, tenant=b"t", task="code", adapter="sql@1")
    (opened,) = target.opens
    told = 1, token_array([1, 2, 3]), prefix_hash([1, 2, 3]), 3, params, 9, "code", b"t", "sql@1"
    assert same(opened, Open("r", *told, max_draft_tokens=16))
    assert [item.text.params for item in target.items] == [params] * 6
    assert [item.base_len > 0 for item in target.items] == [False] + [True] * 5


async def test_the_watch_goes_on_after_a_defect(monkeypatch: pytest.MonkeyPatch):
    coordinator, looked, defects = Coordinator(Config()), asyncio.Event(), [ArithmeticError()]

    def tick() -> None:
        if defects:
            raise defects.pop()
        looked.set()

    monkeypatch.setattr(coordinator, "tick", tick)
    await coordinator.start()
    await asyncio.wait_for(looked.wait(), 20)
    await coordinator.stop()
