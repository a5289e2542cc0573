"""What is measured can be read, by the names that are ours and by vLLM's; what clients are told is
counted once, as it is told, and by one reason."""

import itertools
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster import metrics
from cluster.metrics import Metric
from cluster.metrics.recorder import (
    COORDINATOR,
    EVERY_METRIC,
    INGRESS,
    TARGET,
    Recorder,
    Tokens,
    Told,
    ToldRequest,
)
from tests.support.clock import FakeClock
from tests.support.metrics import enter, page

of_every_metric = pytest.mark.parametrize("metric", EVERY_METRIC, ids=lambda each: each.name)


@of_every_metric
def test_every_metric_has_a_plain_name_a_definition_and_known_kind(metric: Metric):
    assert re.fullmatch(r"(drafthouse_|vllm:)[a-z0-9_]+", metric.name)
    # Prometheus adds _total to counters by itself.
    assert metric.kind != "counter" or not metric.name.endswith("_total")
    assert metric.help.endswith((".", ")"))
    assert metric.kind in ("counter", "gauge", "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_names_are_unique():
    assert len({metric.name for metric in EVERY_METRIC}) == len(EVERY_METRIC)


def test_times_are_in_seconds_and_say_so():
    for metric in EVERY_METRIC:
        if metric.kind == "histogram" and "second" in metric.help.lower():
            assert metric.name.endswith("_seconds")


@of_every_metric
def test_every_metric_can_be_recorded_and_read_back(metric: Metric):
    recorder = Recorder()
    labels = {name: f"a-{name}" for name in metric.labels}
    vllms = {"model_name": "", "engine": "0"} if metric.name.startswith("vllm:") else {}
    values = [value for _, value in sorted((labels | vllms).items())]
    for number in (1.0, 2.0):
        enter(recorder, metric, number, **labels)
    wanted = {
        "counter": {"_total": 3.0},
        "gauge": {"": 2.0},
        "histogram": {"_count": 2.0, "_sum": 3.0},
    }[metric.kind]
    found = page(recorder)
    for suffix, number in wanted.items():
        assert found[" ".join((metric.name + suffix, *values))] == number


def test_a_wrong_label_is_an_error_and_not_a_new_series():
    with pytest.raises(ValueError, match="abel"):
        Recorder().add(metrics.STEPS, traget="t-1")


# What metrics can have at most, beside 32 segments and `other`, five drafters and ten tasks.
SIZES = {
    "segment": 33,
    "drafter": 5,
    "task": 10,
    "law": 2,
    "outcome": 2,
    "finish_reason": 4,
    "kind": 3,
    "key": 101,
    "why": 8,
    "code": 14,
    "part": 6,
    "position": 16,
    "worker": 6,
}


def test_there_are_at_most_five_thousand_series():
    recorder = Recorder("c-1", model_name="m")
    for metric in EVERY_METRIC:
        values = [[f"{name}-{n}" for n in range(SIZES.get(name, 1))] for name in metric.labels]
        for combination in itertools.product(*values):
            enter(recorder, metric, 1.0, **dict(zip(metric.labels, combination, strict=True)))
    lines = recorder.render().decode().splitlines()
    assert sum(not line.startswith("#") for line in lines) <= 5000


def test_tokens_are_counted_as_they_come_and_once():
    recorder = Recorder(only=INGRESS)
    request = ToldRequest(Told(recorder), "code", "app")
    request.grow(Tokens(prompt=5, cached=2, output=1))
    request.grow(Tokens(prompt=5, cached=2, output=1))
    request.grow(Tokens(prompt=5, cached=2, output=4))
    request.end(["stop"])
    found = page(recorder)
    assert found["drafthouse_prompt_tokens_total app code"] == 5
    assert found["drafthouse_output_tokens_total app code"] == 4
    assert found["drafthouse_requests_total stop app code"] == 1
    assert [value for name, value in found.items() if "prompt_tokens_cached_total" in name] == [2]


@pytest.mark.parametrize(
    ("reasons", "counted"),
    [
        (["stop", "stop"], "stop"),
        (["stop", "length"], "length"),
        (["length", "cancelled"], "cancelled"),
        (["error", "cancelled", "stop"], "error"),
    ],
)
def test_a_request_with_several_texts_counts_by_one_reason(reasons: list[str], counted: str):
    recorder = Recorder(only=INGRESS)
    request = ToldRequest(Told(recorder), "code", "")
    request.grow(Tokens(prompt=1))
    request.end(reasons)
    found = {
        name: value for name, value in page(recorder).items() if "drafthouse_requests_total" in name
    }
    assert found == {f"drafthouse_requests_total {counted}  code": 1}


def test_an_error_before_the_answer_is_a_refusal_and_later_it_is_not():
    recorder = Recorder(only=INGRESS)
    told = Told(recorder)
    ToldRequest(told, "code", "").end(["error"], "worker_error")
    begun = ToldRequest(told, "code", "")
    begun.grow(Tokens(prompt=1, output=1))
    begun.end(["error"], "worker_error")
    found = page(recorder)
    assert found["drafthouse_rejected_requests_total worker_error"] == 1
    assert found["drafthouse_requests_total error  code"] == 1


def test_a_rate_is_of_the_last_ten_full_seconds():
    recorder, clock = Recorder(only=INGRESS), FakeClock()
    ToldRequest(Told(recorder, clock), "code", "").grow(Tokens(prompt=30, output=5))

    def rates() -> tuple[float, float]:
        found = page(recorder)
        name = "drafthouse_tokens_per_second"
        return found[f"{name} prompt"], found[f"{name} output"]

    assert rates() == (0.0, 0.0)
    clock.now += 10.0
    assert rates() == (3.0, 0.5)
    clock.now += 10.0
    assert rates() == (0.0, 0.0)


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


def test_names_kinds_labels_and_bounds_are_vllms():
    recorder = Recorder("c-1", model_name="a-model")
    for metric in EVERY_METRIC:
        for value in ("1", "2"):
            enter(recorder, metric, 3.0, **dict.fromkeys(metric.labels, value))
    found = {kind: {} for kind in NAMES}
    for family in text_string_to_metric_families(recorder.render().decode()):
        name = family.name.removeprefix("vllm:")
        if name == family.name:
            continue
        own, bounds = set(), set()
        for sample in family.samples:
            assert LABELS.items() <= sample.labels.items()
            own |= sample.labels.keys() - LABELS.keys() - {"le"}
            bounds.add(sample.labels.get("le"))
        found[family.type][name] = tuple(sorted(own))
        assert bounds >= BOUNDS.get(name, set()), name
    assert found == NAMES


def test_a_total_is_the_sum_over_our_labels():
    recorder = Recorder("c-1", model_name="a-model")
    for drafter, task, count in (("a", "code", 3), ("b", "code", 4), ("a", "prose", 5)):
        recorder.add(metrics.NUM_DRAFT_TOKENS, count, drafter=drafter, task=task)
    for drafter in ("a", "b"):
        recorder.add(metrics.NUM_ACCEPTED_PER_POS, 2, drafter=drafter, position="3")
    for task, time_s in (("code", 0.5), ("prose", 0.03125)):
        recorder.observe(metrics.TTFT, time_s, task=task)
    recorder.add(metrics.REQUESTS, 7, task="code", segment="", finish_reason="cancelled")
    found = page(recorder)
    assert found["vllm:spec_decode_num_draft_tokens_total c-1 a-model"] == 12
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total c-1 a-model 3"] == 4
    assert found["vllm:time_to_first_token_seconds_count c-1 a-model"] == 2
    assert found["vllm:time_to_first_token_seconds_bucket c-1 0.04 a-model"] == 1
    assert found["vllm:time_to_first_token_seconds_bucket c-1 +Inf a-model"] == 2
    assert found["vllm:time_to_first_token_seconds_sum c-1 a-model"] == 0.53125
    assert found["vllm:request_success_total c-1 abort a-model"] == 7


def test_all_that_vllm_shows_before_the_first_request_is_there_as_zero():
    fresh = Recorder("c-1", model_name="a-model")
    found = page(fresh)
    assert found["vllm:spec_decode_num_drafts_total c-1 a-model"] == 0
    assert found["vllm:request_success_total c-1 stop a-model"] == 0
    assert found["vllm:num_requests_waiting_by_reason c-1 a-model deferred"] == 0
    assert found["vllm:time_to_first_token_seconds_bucket c-1 +Inf a-model"] == 0
    fresh.set(metrics.QUEUED, 2)
    assert page(fresh)["vllm:num_requests_waiting_by_reason c-1 a-model capacity"] == 2


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
