"""A coordinator's requests and steps under vLLM's names, the gauges of the moment, and what engines
compute with, which is told for as long as their workers are there."""

import dataclasses
import math
import time
from dataclasses import replace

import pytest

from cluster.models.engine_state import EngineState
from cluster.rpc.messages import AdapterList, Load, ProposalFrame, StepReport, VerdictFrame
from tests.support.coordinator.house import GREEDY, at_work, house, request, text_of
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_chain


async def test_a_finished_request_is_told_with_its_phases():
    """A second each until a verdict is there, from its place on."""

    def takes_its_time(frame: VerdictFrame) -> VerdictFrame:
        stage.clock.now += bool(frame.verdicts)
        return frame

    async with house(["a"]) as stage:
        stage.add_drafter(ToyDrafter("a", oracle_chain()))
        stage.clock.now += 1.0
        events = []
        asked = request(counts_steps=True)
        stage.coordinator._table.open("r", asked, events.append)
        assert stage.value("vllm:num_requests_waiting_by_reason", reason="capacity") == 1
        stage.clock.now += 3.0
        stage.add_target(ToyTarget(says=takes_its_time))
        await stage.settle(2000)
    stats = events[-1].stats
    counts = [step for event in events for step in event.steps]
    assert [step.decode_time_s for step in counts] == [*range(stats.num_steps)]
    assert events[-1].prefill_time_s == 1.0
    decode_s = stats.num_steps - 1
    for series, expected in {
        "iteration_tokens_total_sum": 3 + len(text_of(events)),
        "request_queue_time_seconds_sum": 3.0,
        "time_to_first_token_seconds_sum": 4.0,
        "e2e_request_latency_seconds_sum": 4.0 + decode_s,
        "request_prefill_time_seconds_sum": 1.0,
        "request_decode_time_seconds_sum": decode_s,
        "request_inference_time_seconds_sum": 1.0 + decode_s,
        "request_time_per_output_token_seconds_sum": decode_s / (len(text_of(events)) - 1),
        "inter_token_latency_seconds_count": decode_s,
        "spec_decode_num_drafts_total": stats.num_spec_steps,
        "spec_decode_num_draft_tokens_total": stats.num_draft_tokens,
        "spec_decode_num_accepted_tokens_total": stats.num_accepted_draft_tokens,
    }.items():
        assert stage.value(f"vllm:{series}") == expected, series
    assert stats.num_spec_steps > 0
    for own in ("prompt_tokens", "generation_tokens"):
        assert f"vllm:{own}_total" not in stage.metrics(), "the ingress' own"


async def test_the_moment_has_its_pages_and_its_adapters():
    async with at_work(ToyTarget(is_held=True), max_running_sequences=2) as stage:
        seat = stage.seat
        seat.note_load(Load(pages_in_use=3, pages_total=12))
        assert stage.value("vllm:kv_cache_usage_perc") == 0.25
        cache = {"block_size": "16", "num_gpu_blocks": "12", "enable_prefix_caching": "True"}
        assert stage.value("vllm:cache_config_info", **cache) == 1
        assert "vllm:lora_requests_info{" not in stage.metrics()
        stage.coordinator._present.adapters = AdapterList(("sql@12ab",))
        named = {"max_lora": "1", "running_lora_adapters": "sql", "waiting_lora_adapters": "nl"}
        for name in ("", "sql@12ab", "nl@34cd"):
            stage.coordinator._table.open(name, request(adapter=name), lambda event: None)
        assert stage.value("vllm:lora_requests_info", **named) > 0


async def test_the_moment_has_its_drafters_and_the_age_of_the_oldest():
    async with at_work() as stage:
        for age_s in (1e6, 2e6):
            written_at = time.time() - age_s
            stage.add_drafter(ToyDrafter("a", oracle_chain()), f"r{age_s}", written_at=written_at)
        first, _ = stage.coordinator._pool
        first.note_held(ProposalFrame(num_requests=3, pages_in_use=1, pages_total=4))
        for series, expected in {
            "drafter_up": 2,
            "drafter_age_seconds": pytest.approx(2e6, abs=100.0),
            "drafter_requests": 3,
            "kv_pages_in_use": 1,
            "kv_pages": 4,
        }.items():
            labels = {"role": "drafter"} if "kv" in series else {"drafter": "a"}
            assert stage.value(f"drafthouse_{series}", **labels) == expected, series


async def test_a_step_is_told_whole_and_one_that_reads_or_has_no_times_is_none_of_decoding(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("cluster.coordinator.moment._MAX_RECENT_STEPS", 1)
    step = StepReport(0.5, 0.25, 1.0, 0.125, num_sequences=2, num_nodes=3, num_emitted_tokens=4)
    others = {"num_prefill_tokens": 5, "num_prompt_tokens": 6, "num_sequences": 0, "period_s": 0.0}
    wrong = [("step_time_s", time_s) for time_s in (math.nan, math.inf, -1.0)]
    async with at_work() as stage:
        seat = stage.seat
        for name, value in (("num_nodes", 9), ("num_nodes", 3), *others.items(), *wrong):
            report = replace(step, **{"num_preempted": 1, name: value})
            stage.coordinator._targets._take_report(seat, report)
        for series, expected in {
            "drafthouse_target_steps_total": 6,
            "drafthouse_target_step_seconds_sum": 3.0,
            "drafthouse_target_forward_seconds_sum": 1.5,
            "drafthouse_batch_size_sum": 10,
            "drafthouse_round_overhead_seconds_sum": 1.25,
            "vllm:iteration_tokens_total_sum": 6 * 4 + 6,
            "vllm:num_preemptions_total": 6,
        }.items():
            labels = {"target": seat.id} if "_target_" in series else {}
            assert stage.value(series, **labels) == expected, series
        (recent,) = stage.status()["recent_steps"]
    assert recent.items() <= dataclasses.asdict(step).items()


async def test_a_prompt_that_is_scored_is_read_and_not_drawn():
    scored = replace(GREEDY, max_tokens=4, forced_ids=(7, 8, 9, 10), logprobs=0)
    async with at_work(drafters=[]) as stage:
        await stage.ask((6,), scored)
        await stage.settle()
    # All but the first, which a target cannot tell from the last one of a text in decoding.
    assert stage.value("vllm:iteration_tokens_total_sum") == 4
    for series in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert f"vllm:{series}_seconds_count{{" in stage.metrics()
        assert stage.value(f"vllm:{series}_seconds_count") == 0


SLOW = EngineState(
    "", "cuda:0", "sdpa", "none", "torch", 2**31, 4096, ("attention: no compiler",), "bfloat16"
)
FAST = EngineState("lm", "cuda:0", "triton", "cuda", "triton", 2**20, 512)


async def test_engines_of_drafters_that_were_made_anew_take_the_place_of_the_former():
    anew = replace(FAST, weights="int8", fallbacks=("graphs: none",))
    toy = ToyTarget()
    async with at_work(toy) as stage:
        for engines in ((SLOW, FAST), (SLOW, anew)):
            toy.streams.engines = engines
            toy.streams.announce(AdapterList())
            await stage.settle()
        told = stage.status()["engines"]
        text = stage.metrics()
    of = {"role": "target", "worker": "target-0"}
    assert told == [of | dataclasses.asdict(each) for each in (SLOW, anew)]
    assert [line for line in text.splitlines() if 'engine="lm"' in line] == [
        'drafthouse_engine_info{attention="triton",device="cuda:0",engine="lm",graphs="cuda",'
        'kernels="triton",role="target",weights="int8",worker="target-0"} 1.0',
        'drafthouse_engine_fallbacks{engine="lm",role="target",worker="target-0"} 1.0',
    ]
