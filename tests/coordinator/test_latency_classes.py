"""Whose speed counts for more gets more of a step's nodes; nobody's text is another."""

import asyncio
from dataclasses import replace

import pytest

from cluster.core import SpeculationOptions
from tests.support.coordinator.house import GREEDY, collect, house, request, text_of
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_chain, plain_text

LONG = replace(GREEDY, max_tokens=400)


async def nodes_per_step(*classes: str) -> list[float]:
    """Of two requests of these classes whose drafts are equally good, side by side."""
    async with house(["a"], budget="adaptive") as stage:
        # Four rows more than the two texts' own are for nothing, others take a step each.
        target = ToyTarget(step_s=0.010, row_s=0.010, free_rows=6)
        stage.add_target(target)
        stage.add_drafter(ToyDrafter("a", oracle_chain(4), survival=0.9))
        asked = [
            request(
                [1, 2, 3 + i], LONG, f"r{i}", speculation=SpeculationOptions(latency_class=name)
            )
            for i, name in enumerate(classes)
        ]
        texts = await asyncio.gather(*(collect(stage.coordinator, each) for each in asked))
        for i, events in enumerate(texts):
            assert text_of(events) == plain_text([1, 2, 3 + i], LONG)
        together = [items for items in target.steps if len(items) == 2]
        sizes = [{item.request_id[-2:]: len(item.tree) for item in items} for items in together]
        assert len(sizes) > 50
        return [sum(each[f"r{i}"] for each in sizes) / len(sizes) for i in range(2)]


async def test_the_heavier_class_gets_more_of_the_nodes_and_equals_share_alike():
    light, heavy = await nodes_per_step("throughput", "interactive")
    assert heavy > 2.0 * light
    first, second = await nodes_per_step("interactive", "interactive")
    assert first == pytest.approx(second, rel=0.3)
