"""A coordinator goes on with other values of its keys; what runs keeps what it was opened with."""

from typing import Any

import pytest

from cluster.config.live import changed
from cluster.config.schema import (
    Config,
    CoordinatorConfig,
    DrafterConfig,
    EngineConfig,
    TargetConfig,
)
from cluster.core import SpeculationOptions
from cluster.errors import CapacityError, RequestError
from tests.support.coordinator.house import House, at_work, house, request
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_chain

CONFIG = Config(
    model_name="m",
    target=TargetConfig(engine=EngineConfig(model="m")),
    drafters={name: DrafterConfig(kind="prompt_lookup") for name in "ab"},
    coordinator=CoordinatorConfig(budget="fixed"),
)


def tell(stage: House, **user_config: Any) -> None:
    stage.coordinator.use(changed(CONFIG, user_config))


async def opened_with(stage: House, target: ToyTarget, **options: Any) -> Any:
    """Return what the target was told of a new text."""
    await stage.ask([1, 2], **options)
    return target.opens[-1]


async def test_new_texts_are_opened_by_the_new_values_and_the_old_ones_come_back():
    target = ToyTarget()
    async with at_work(target) as stage:
        assert (await opened_with(stage, target)).drafters == ("a", "b")
        tell(stage, tasks={"default": ["b"]}, coordinator={"max_draft_tokens": 3})
        opened = await opened_with(stage, target)
        assert (opened.drafters, opened.max_draft_tokens) == (("b",), 3)
        tell(stage)
        opened = await opened_with(stage, target)
        assert (opened.drafters, opened.max_draft_tokens) == (("a", "b"), 16)


async def test_limits_hold_at_once():
    target = ToyTarget()
    async with at_work(target) as stage:
        tell(stage, coordinator={"max_running_sequences": 1, "max_queued_requests": 1})
        held = []
        for number in range(2):
            asked = request([1, 2, number], id=f"r{number}")
            stage.coordinator._table.open(asked.id, asked, held.append)
        assert stage.coordinator.load().num_waiting == 1
        with pytest.raises(CapacityError, match=r"raise coordinator\.max_queued_requests"):
            stage.coordinator._table.open("late", request([1, 2, 3], id="late"), held.append)
        tell(stage, coordinator={"max_running_sequences": 2})
        assert stage.coordinator.load().num_waiting == 0, "who waited has a place"


async def test_classes_come_and_go():
    rush = SpeculationOptions(latency_class="rush")
    target = ToyTarget()
    async with at_work(target) as stage:
        with pytest.raises(RequestError, match="rush"):
            await stage.ask([1, 2], speculation=rush)
        tell(stage, coordinator={"latency_classes": {"rush": 2.0}})
        assert (await opened_with(stage, target, speculation=rush)).latency_class == "rush"


async def test_a_change_that_is_refused_is_reported_until_one_is_not():
    async with house() as stage:
        stage.coordinator.refuse_config("a reason")
        assert stage.status()["refused"] == {"coordinator.user_config": "a reason"}
        tell(stage)
        assert stage.status()["refused"] == {}
        drafter = ToyDrafter("a", oracle_chain())
        stage.add_drafter(drafter, refused={"a": "why"})
        assert stage.status()["refused"] == {"drafter-a.user_config": "why"}
        stage.add_drafter(drafter)
        assert stage.status()["refused"] == {}
        stage.coordinator.refuse_drafter("b", "why")
        stage.coordinator.use(Config())
        assert stage.status()["refused"] == {}
