"""Whose traffic a request is: who may say so, and what the metrics tell of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cluster.config.schema import Config, DrafterConfig, IngressConfig
from cluster.metrics.recorder import side_by_side
from deployments.ingress.keys import KeyRing
from tests.support.coordinator.toys import ToyDrafter, oracle_chain
from tests.support.deployments.place import Place, generate, place, write_keys
from tests.support.errors import config_error

CONFIG = Config(
    ingress=IngressConfig(segments=("web", "batch", "app")),
    drafters={"right": DrafterConfig(kind="prompt_lookup")},
)
PATH = "/v1/completions"


async def ask(here: Place, header: str = "", key: str = "", **fields: Any) -> str:
    """Ask once; returns the segment that the request was opened with."""
    headers = {"X-Drafthouse-Segment": header} if header else {}
    body = {"max_tokens": 8, "ignore_eos": True, **fields}
    before = values(here, "drafthouse_requests_total")
    answer = await here.ask(PATH, key=key, headers=headers, **body)
    assert answer.status_code == 200, answer.text
    after = values(here, "drafthouse_requests_total")
    (segment,) = (name for name in after if after[name] != before.get(name, 0))
    return segment


def values(here: Place, name: str) -> dict[str, float]:
    recorders = here.ingress.recorder, here.rooms.coordinator.recorder
    page = side_by_side([each.render() for each in recorders]).decode()
    return {
        sample.labels["segment"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


async def test_header_metadata_and_user_name_it_in_this_order():
    async with place(CONFIG) as here:
        assert await ask(here) == "other"
        assert await ask(here, user="app") == "app"
        assert await ask(here, user="app", metadata={"segment": "batch"}) == "batch"
        assert await ask(here, "web", user="app", metadata={"segment": "batch"}) == "web"
        assert await ask(here, "mallory", user="app") == "other"
        async with here.listening() as (channel, _):
            metadata = {"segment": "batch"}
            async for _ in generate(channel, metadata=metadata):
                pass
        assert values(here, "drafthouse_requests_total")["batch"] == 2


async def test_a_key_says_it_for_good(tmp_path: Path):
    keys = write_keys(tmp_path / "keys.yaml", alice={"segment": "app"}, bob={})
    async with place(replace(CONFIG, access=keys)) as here:
        assert await ask(here, "web", "alice", user="batch") == "app"
        assert await ask(here, "web", "bob") == "web"
    keys = write_keys(tmp_path / "keys.yaml", alice={"segment": "apps"})
    with config_error(r"keys\.alice\.segment: 'apps' is no segment"):
        KeyRing(replace(CONFIG, access=keys))


async def test_where_none_are_configured_nothing_is_told():
    async with place(replace(CONFIG, ingress=IngressConfig())) as here:
        assert await ask(here, "web", user="app") == ""
        assert values(here, "drafthouse_segment_draft_tokens_total") == {}
        assert values(here, "drafthouse_segment_time_to_first_token_seconds_count") == {}


async def test_the_metrics_of_segments_add_up():
    async with place(CONFIG) as here:
        here.rooms.add_drafter(ToyDrafter("right", oracle_chain(3)))
        for segment in ("web", "web", "app"):
            await ask(here, segment)
        tokens = values(here, "drafthouse_output_tokens_total")
        drafted = values(here, "drafthouse_segment_draft_tokens_total")
        accepted = values(here, "drafthouse_segment_accepted_draft_tokens_total")
        first = values(here, "drafthouse_segment_time_to_first_token_seconds_count")
        prompts = values(here, "drafthouse_prompt_tokens_total")
    assert tokens == {"web": 16, "app": 8}
    assert first == {"web": 2, "app": 1}
    assert prompts["web"] == 2 * prompts["app"]
    assert drafted["web"] >= accepted["web"] > 0 < accepted["app"] <= drafted["app"]
