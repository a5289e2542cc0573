"""Whose speed counts for more gets more of a step's nodes; nobody's text is another."""

import asyncio
from dataclasses import replace

import pytest

from cluster.core import SpeculationOptions
from tests.support.coordinator.house import GREEDY, at_work
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_chain

LONG = replace(GREEDY, max_tokens=400)


async def nodes_per_step(*classes: str) -> list[float]:
    """Of two requests of these classes whose drafts are equally good, side by side."""
    # Four rows more than the two texts' own are for nothing, others take a step each.
    target = ToyTarget(step_s=0.010, row_s=0.010, free_rows=6)
    drafter = ToyDrafter("a", oracle_chain(), survival=0.9)
    async with at_work(target, drafter, budget="adaptive") as stage:
        await asyncio.gather(
            *(
                stage.ask(
                    [1, 2, 3 + i], LONG, f"r{i}", speculation=SpeculationOptions(latency_class=name)
                )
                for i, name in enumerate(classes)
            )
        )
    together = [items for items in target.steps if len(items) == 2]
    sizes = [{item.request_id[-2:]: len(item.tree) for item in items} for items in together]
    assert len(sizes) > 50
    return [sum(each[f"r{i}"] for each in sizes) / len(sizes) for i in range(2)]


async def test_the_heavier_class_gets_more_of_the_nodes_and_equals_share_alike():
    light, heavy = await nodes_per_step("throughput", "interactive")
    assert heavy > 2.0 * light
    first, second = await nodes_per_step("interactive", "interactive")
    assert first == pytest.approx(second, rel=0.3)
