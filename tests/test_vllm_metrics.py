"""What was made for vLLM reads our metrics: its names and labels, and totals that are true."""

from prometheus_client.parser import text_string_to_metric_families

from cluster import metrics
from cluster.metrics.recorder import EVERY_METRIC, Recorder
from cluster.metrics.told import COORDINATOR, INGRESS, TARGET
from tests.support.metrics import enter

LABELS = {"model_name": "a-model", "engine": "c-1"}

# As in vLLM 0.32, with the labels that it has beside model_name and engine.
NAMES = {
    "gauge": {
        "num_requests_running": (),
        "num_requests_waiting": (),
        "num_requests_waiting_by_reason": ("reason",),
        "kv_cache_usage_perc": (),
        "cache_config_info": ("block_size", "enable_prefix_caching", "num_gpu_blocks"),
        "lora_requests_info": ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    },
    "counter": {
        "prompt_tokens": (),
        "prompt_tokens_cached": (),
        "generation_tokens": (),
        "prefix_cache_queries": (),
        "prefix_cache_hits": (),
        "num_preemptions": (),
        "request_success": ("finished_reason",),
        "spec_decode_num_drafts": (),
        "spec_decode_num_draft_tokens": (),
        "spec_decode_num_accepted_tokens": (),
        "spec_decode_num_accepted_tokens_per_pos": ("position",),
    },
    "histogram": {
        "time_to_first_token_seconds": (),
        "inter_token_latency_seconds": (),
        "request_time_per_output_token_seconds": (),
        "e2e_request_latency_seconds": (),
        "request_queue_time_seconds": (),
        "request_inference_time_seconds": (),
        "request_prefill_time_seconds": (),
        "request_decode_time_seconds": (),
        "request_prompt_tokens": (),
        "request_generation_tokens": (),
        "iteration_tokens_total": (),
    },
}
# Some of vLLM's bounds; ours may have more beside them.
BOUNDS = {
    "time_to_first_token_seconds": {"0.001", "0.04", "0.25", "2560.0"},
    "inter_token_latency_seconds": {"0.01", "0.075", "80.0"},
    "request_time_per_output_token_seconds": {"0.01", "0.075", "80.0"},
    "e2e_request_latency_seconds": {"0.3", "1.5", "7680.0"},
    "request_prompt_tokens": {"1.0", "2.0", "5.0", "1000.0"},
    "iteration_tokens_total": {"1.0", "8.0", "16384.0"},
}


def busy() -> Recorder:
    """A recorder with something under every name."""
    recorder = Recorder("c-1", model_name="a-model")
    for metric in EVERY_METRIC:
        for value in ("1", "2"):
            enter(recorder, metric, 3.0, **dict.fromkeys(metric.labels, value))
    return recorder


def test_names_kinds_and_labels_are_vllms():
    found: dict[str, dict[str, tuple[str, ...]]] = {kind: {} for kind in NAMES}
    for family in text_string_to_metric_families(busy().render().decode()):
        if not family.name.startswith("vllm:"):
            continue
        own = set()
        for sample in family.samples:
            assert LABELS.items() <= sample.labels.items()
            own |= sample.labels.keys() - LABELS.keys() - {"le"}
        found[family.type][family.name.removeprefix("vllm:")] = tuple(sorted(own))
    assert found == NAMES


def test_histograms_have_vllms_bounds():
    bounds: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(busy().render().decode()):
        for sample in family.samples:
            if "le" in sample.labels:
                bounds.setdefault(family.name, set()).add(sample.labels["le"])
    for name, some in BOUNDS.items():
        assert some <= bounds[f"vllm:{name}"], name


def value(recorder: Recorder, name: str, **labels: str) -> float | None:
    for family in recorder.collect():
        for sample in family.samples:
            if sample.name == name and sample.labels == LABELS | labels:
                return sample.value
    return None


def test_a_total_is_the_sum_over_our_labels():
    recorder = Recorder("c-1", model_name="a-model")
    for drafter, task, count in (("a", "code", 3), ("b", "code", 4), ("a", "prose", 5)):
        recorder.add(metrics.NUM_DRAFT_TOKENS, count, drafter=drafter, task=task)
    for drafter in ("a", "b"):
        recorder.add(metrics.NUM_ACCEPTED_PER_POS, 2, drafter=drafter, position="3")
    for task, time_s in (("code", 0.5), ("prose", 0.03125)):
        recorder.observe(metrics.TTFT, time_s, task=task)
    recorder.add(metrics.REQUESTS, 7, task="code", segment="", finish_reason="cancelled")
    drafted, at_place = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens_per_pos"
    assert value(recorder, f"vllm:{drafted}_total") == 12
    assert value(recorder, f"vllm:{at_place}_total", position="3") == 4
    ttft = "vllm:time_to_first_token_seconds"
    assert value(recorder, f"{ttft}_count") == 2
    assert value(recorder, f"{ttft}_bucket", le="0.04") == 1
    assert value(recorder, f"{ttft}_bucket", le="+Inf") == 2
    assert value(recorder, f"{ttft}_sum") == 0.53125
    assert value(recorder, "vllm:request_success_total", finished_reason="abort") == 7


def test_all_that_vllm_shows_before_the_first_request_is_there_as_zero():
    fresh = Recorder("c-1", model_name="a-model")
    assert value(fresh, "vllm:spec_decode_num_drafts_total") == 0
    assert value(fresh, "vllm:request_success_total", finished_reason="stop") == 0
    assert value(fresh, "vllm:num_requests_waiting_by_reason", reason="deferred") == 0
    assert value(fresh, "vllm:time_to_first_token_seconds_bucket", le="+Inf") == 0
    fresh.set(metrics.QUEUED, 2)
    assert value(fresh, "vllm:num_requests_waiting_by_reason", reason="capacity") == 2


def test_a_process_that_counts_no_requests_has_none_of_vllms_names():
    assert b"vllm:" not in Recorder("i-1", only=(metrics.MISSING_PROCESSES,)).render()


def test_every_name_has_one_kind_of_process_that_counts_it():
    ingress, coordinator, target = (
        {family.name for family in Recorder("p", only=own).collect()}
        for own in (INGRESS, COORDINATOR, TARGET)
    )
    assert not ingress & (coordinator | target)
    everything = {family.name for family in Recorder("p").collect()}
    assert ingress | coordinator | target == everything
