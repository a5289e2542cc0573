"""Leading workers at known addresses over real gRPC; they may join, leave and rejoin."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from cluster.config.schema import Config, CoordinatorConfig, DrafterConfig
from cluster.coordinator.coordinator import Coordinator
from cluster.lead import known, led_by
from cluster.rpc.server import serve_worker
from tests.support.coordinator.house import GREEDY, collect, request, text_of
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_in_a_crowd, plain_text

LONG = replace(GREEDY, max_tokens=300)


@asynccontextmanager
async def leading(target: str, drafter: str | None = None) -> AsyncIterator[Coordinator]:
    config = Config(
        drafters={"a": DrafterConfig(kind="prompt_lookup")},
        coordinator=CoordinatorConfig(budget="fixed", breaker_failures=100),
    )
    coordinator = Coordinator(config)
    await coordinator.start()
    led = [led_by(coordinator, config, known([target]))]
    if drafter is not None:
        led.append(led_by(coordinator, config, known([drafter]), "a"))
    for each in led:
        each.start()
    try:
        yield coordinator
    finally:
        for each in led:
            await each.stop()
        await coordinator.stop()


async def test_a_target_that_restarts_at_its_address_continues_the_text():
    first = ToyTarget()
    server = await serve_worker(first)
    async with leading(server.address) as coordinator:
        running = asyncio.create_task(collect(coordinator, request(params=LONG)))
        await first.wait_for_steps(20)
        await server.stop(0)
        second = await serve_worker(ToyTarget(), port=server.port)
        assert text_of(await running) == plain_text([1, 2, 3], LONG)
        await second.stop(0)


async def test_a_drafter_that_starts_later_joins():
    target = await serve_worker(ToyTarget())
    placeholder = await serve_worker(ToyDrafter("a", oracle_in_a_crowd(1)))
    await placeholder.stop(0)
    async with leading(target.address, placeholder.address) as coordinator:
        assert text_of(await collect(coordinator, request(id="one")))
        toy = ToyDrafter("a", oracle_in_a_crowd(1))
        drafter = await serve_worker(toy, port=placeholder.port)
        async with asyncio.timeout(20):
            while not toy.frames:
                await collect(coordinator, request(id="more"))
        await drafter.stop(0)
    await target.stop(0)
