"""What new requests may ask for travels from the targets to every ingress."""

import asyncio
from dataclasses import dataclass

from cluster.config.schema import CoordinatorConfig
from cluster.coordinator.workers import TARGET_CONFIG, served_by_all
from cluster.rpc.messages import AdapterList, WorkerDescription
from tests.support.coordinator.house import house, request
from tests.support.coordinator.toys import ToyTarget
from tests.support.deployments.stage import Stage, stage

ONE, BOTH = AdapterList(("a@1",)), AdapterList(("a@1", "b@2"))


def test_what_only_some_targets_have_is_not_served():
    said = [BOTH], [BOTH, ONE], [BOTH, AdapterList(("a@3", "b@2"))], [BOTH, BOTH]
    assert [*map(served_by_all, said)] == [BOTH, ONE, AdapterList(("b@2",)), BOTH]
    refused = AdapterList(("a@1",), "b does not fit")
    assert served_by_all([ONE, refused]) == refused


@dataclass(eq=False)
class Telling(ToyTarget):
    """Says at the beginning what it serves."""

    adapters: AdapterList = ONE

    def begin(self, description: WorkerDescription, settings: CoordinatorConfig) -> None:
        super().begin(description, settings)
        self.tell(self.adapters)

    def tell(self, adapters: AdapterList) -> None:
        self.adapters = adapters
        self.streams.announce(adapters)


async def until(setting: Stage, wanted: dict[str, str]) -> None:
    for _ in range(2000):
        if setting.ingress.adapters == wanted:
            return
        await asyncio.sleep(0)
    assert setting.ingress.adapters == wanted


async def test_the_ingress_asks_for_what_it_hears_of_and_hears_of_every_change():
    target = Telling()
    async with stage() as setting, house() as only:
        setting.add("a", only, target)
        await until(setting, {"a": "a@1"})
        ticket = setting.ingress.submit(request(adapter="a@1"), asyncio.Event())
        await target.wait_for_frames(1)
        assert [opened.adapter for opened in target.opens] == ["a@1"]
        ticket.close()
        target.tell(AdapterList(("a@9", "b@2"), "c does not fit"))
        await until(setting, {"a": "a@9", "b": "b@2"})
        assert only.status()["refused"] == {TARGET_CONFIG: "c does not fit"}
        target.tell(AdapterList())
        await until(setting, {})
        assert only.status()["refused"] == {}


async def test_an_ingress_serves_what_all_of_its_coordinators_have():
    async with stage() as setting, house() as first, house() as second:
        setting.add("a", first, Telling(adapters=BOTH))
        await until(setting, {"a": "a@1", "b": "b@2"})
        setting.add("b", second, Telling(adapters=ONE))
        await until(setting, {"a": "a@1"})
        setting.links["b"].sever()
        await until(setting, {"a": "a@1", "b": "b@2"})
        first.coordinator.remove_target("target-0")
        assert first.coordinator._present.adapters == BOTH, "they stay: one may come back"
