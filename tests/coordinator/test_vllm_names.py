"""A coordinator's requests and steps under vLLM's names, the gauges of the moment, and what engines
compute with, which is told for as long as their workers are there."""

from dataclasses import replace

from cluster.messages import AdapterList, Load
from cluster.models.engine_state import EngineState
from tests.support.coordinator.house import GREEDY, at_work, house, request, text_of
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_chain

PHASES = ("inference", "prefill", "decode")


async def test_a_finished_request_is_told_with_its_phases():
    async with house(["a"]) as stage:
        stage.add_drafter(ToyDrafter("a", oracle_chain()))
        stage.clock.now += 1.0
        events = []
        stage.coordinator._table.open("r", request(), events.append)
        assert stage.value("vllm:num_requests_waiting_by_reason", reason="capacity") == 1
        stage.clock.now += 3.0
        stage.add_target(ToyTarget())
        await stage.settle()
    stats = events[-1].stats
    for series, expected in {
        "iteration_tokens_total_sum": 3 + len(text_of(events)),
        "request_queue_time_seconds_sum": 3.0,
        "e2e_request_latency_seconds_sum": 3.0,  # the clock stood still
        **{f"request_{phase}_time_seconds_count": 1 for phase in PHASES},
        **{f"request_{phase}_time_seconds_sum": 0.0 for phase in PHASES},
        "spec_decode_num_drafts_total": stats.num_spec_steps,
        "spec_decode_num_draft_tokens_total": stats.num_draft_tokens,
        "spec_decode_num_accepted_tokens_total": stats.num_accepted_draft_tokens,
    }.items():
        assert stage.value(f"vllm:{series}") == expected, series
    assert stats.num_spec_steps > 0
    for own in ("prompt_tokens", "generation_tokens"):
        assert f"vllm:{own}_total" not in stage.metrics(), "the ingress' own"


async def test_the_moment_has_its_pages_and_its_adapters():
    async with at_work(drafters=[]) as stage:
        await stage.ask()
        (seat,) = stage.coordinator._present.seats.values()
        seat.note_load(Load(pages_in_use=3, pages_total=12))
        assert stage.value("vllm:kv_cache_usage_perc") == 0.25
        cache = {"block_size": "16", "num_gpu_blocks": "12", "enable_prefix_caching": "True"}
        assert stage.value("vllm:cache_config_info", **cache) == 1
        assert "vllm:lora_requests_info{" not in stage.metrics()
        stage.coordinator._present.adapters.update([AdapterList(("sql@12ab",))])
        assert stage.value("vllm:lora_requests_info", max_lora="1") > 0


async def test_a_step_that_reads_a_short_prompt_counts_it_and_is_none_of_decoding():
    toy = ToyTarget()
    async with at_work(toy, drafters=[]) as stage:
        first = stage.begin(id="a")
        await toy.wait_for_steps(5)
        second = await stage.ask((4, 5, 6, 7), id="b")
        num_drawn = sum(len(text_of(events)) for events in (await first, second))
        await stage.settle()
        assert stage.value("vllm:iteration_tokens_total_sum") == 3 + 4 + num_drawn
        # Each prompt has a step of its own, or shares one with what is decoded.
        assert len(stage.status()["recent_steps"]) <= len(toy.steps) - 2


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
    assert [(each["name"], each["weights"]) for each in told] == [("", "bfloat16"), ("lm", "int8")]
    assert [line for line in text.splitlines() if 'engine="lm"' in line] == [
        'drafthouse_engine_info{attention="triton",device="cuda:0",engine="lm",graphs="cuda",'
        'kernels="triton",role="target",weights="int8",worker="target-0"} 1.0',
        'drafthouse_engine_fallbacks{engine="lm",role="target",worker="target-0"} 1.0',
    ]
