"""A coordinator's requests and steps under vLLM's names, and the gauges of the moment."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from cluster.core import TokenEvent
from cluster.messages import AdapterList, Load
from tests.support.coordinator.house import GREEDY, House, at_work, house, request, text_of
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_chain


def page(stage: House) -> dict[str, float]:
    """Every series of vLLM's names, without the labels that all of them have."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(stage.metrics()):
        for sample in family.samples:
            if family.name.startswith("vllm:"):
                labels = dict(sample.labels)
                del labels["model_name"], labels["engine"]
                found[" ".join((sample.name.removeprefix("vllm:"), *labels.values()))] = (
                    sample.value
                )
    return found


async def test_a_finished_request_is_told_with_its_phases() -> None:
    async with house(["a"]) as stage:
        stage.add_drafter(ToyDrafter("a", oracle_chain()))
        stage.clock.now += 1.0
        events: list[TokenEvent] = []
        stage.coordinator._table.open("r", request(), events.append)
        assert page(stage)["num_requests_waiting_by_reason capacity"] == 1
        stage.clock.now += 3.0
        stage.add_target(ToyTarget())
        await stage.settle()
        found, num_tokens = page(stage), len(text_of(events))
    stats = events[-1].stats
    assert stats is not None
    assert found["iteration_tokens_total_sum"] == 3 + num_tokens
    assert not {"prompt_tokens_total", "generation_tokens_total"} & set(found), "the ingress' own"
    assert found["request_queue_time_seconds_sum"] == 3.0
    assert found["e2e_request_latency_seconds_sum"] == 3.0, "the clock stood still"
    for phase in ("inference", "prefill", "decode"):
        assert found[f"request_{phase}_time_seconds_count"] == 1
        assert found[f"request_{phase}_time_seconds_sum"] == 0.0
    assert found["spec_decode_num_drafts_total"] == stats.num_spec_steps > 0
    assert found["spec_decode_num_draft_tokens_total"] == stats.num_draft_tokens
    assert found["spec_decode_num_accepted_tokens_total"] == stats.num_accepted_draft_tokens


async def test_the_moment_has_its_pages_and_its_adapters() -> None:
    async with at_work(drafters=[]) as stage:
        await stage.ask()
        (seat,) = stage.coordinator._present.seats.values()
        seat.note_load(Load(pages_in_use=3, pages_total=12))
        first = page(stage)
        stage.coordinator._present.adapters.update([AdapterList(("sql@12ab",))])
        second = page(stage)
    assert first["kv_cache_usage_perc"] == 0.25
    assert first["cache_config_info 16 True 12"] == 1
    assert not any(name.startswith("lora_requests_info") for name in first)
    assert any(name.startswith("lora_requests_info 1") for name in second)


async def test_a_step_that_reads_a_short_prompt_counts_it_and_is_none_of_decoding() -> None:
    toy = ToyTarget()
    async with at_work(toy, drafters=[]) as stage:
        first = stage.begin(id="a")
        await toy.wait_for_steps(5)
        second = await stage.ask((4, 5, 6, 7), id="b")
        num_drawn = sum(len(text_of(events)) for events in (await first, second))
        await stage.settle()
        found, status = page(stage), stage.status()
    assert found["iteration_tokens_total_sum"] == 3 + 4 + num_drawn
    # Each prompt has a step of its own, or shares one with what is decoded.
    assert len(status["recent_steps"]) <= len(toy.steps) - 2


async def test_a_prompt_that_is_scored_is_read_and_not_drawn() -> None:
    scored = replace(GREEDY, max_tokens=4, forced_ids=(7, 8, 9, 10), logprobs=0)
    async with at_work(drafters=[]) as stage:
        await stage.ask((6,), scored)
        await stage.settle()
        found = page(stage)
    # All but the first, which a target cannot tell from the last one of a text in decoding.
    assert found["iteration_tokens_total_sum"] == 4
    for series in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert found[f"{series}_seconds_count"] == 0
