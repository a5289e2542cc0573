"""What the coordinator tells drafters, so that there are as many as are worth it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from cluster.rpc.link import memory_pair
from tests.support.coordinator.house import house
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, drafter_description, oracle_chain


async def test_a_full_drafter_gets_no_more_texts_and_is_told_what_its_trees_are_worth() -> None:
    async with house() as stage:
        target = ToyTarget()
        target.gate.clear()
        stage.add_target(target)
        drafter = ToyDrafter("a", oracle_chain())
        ours, theirs = memory_pair()
        stage.tasks.append(asyncio.create_task(drafter.serve(theirs)))
        description = replace(drafter_description("a"), max_running_sequences=2)
        stage.coordinator.add_drafter("a", "r0", description, ours)
        tasks = [stage.begin(id=f"q{i}") for i in range(5)]
        await stage.settle(20)
        assert len(drafter.contexts) == 2
        assert stage.coordinator.demand() == {"a": {"waiting": 3, "worth": 0.0}}
        target.gate.set()
        await asyncio.gather(*tasks)
        stage.clock.now += 2.0
        said = stage.coordinator.demand()["a"]
        assert said["waiting"] == 0
        assert said["worth"] > 10.0, "of 200 tokens in two seconds it has guessed some"
        await stage.ask(id="more")
        assert stage.coordinator.demand()["a"]["worth"] == 0.0, "in no time"
