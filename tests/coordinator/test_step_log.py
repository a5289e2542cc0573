"""What a step's report is entered as."""

from __future__ import annotations

from dataclasses import replace

from tests.coordinator.test_vllm_names import page
from tests.support.coordinator.house import GREEDY, at_work, house, text_of
from tests.support.coordinator.toys import ToyTarget


async def test_a_step_that_reads_a_short_prompt_counts_it_and_is_none_of_decoding() -> None:
    async with house([]) as stage:
        toy = ToyTarget()
        stage.add_target(toy)
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
