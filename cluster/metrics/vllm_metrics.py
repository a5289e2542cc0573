"""The metrics that have vLLM's names, so that what was made for vLLM reads them unchanged.

Their labels are vLLM's own: `model_name`, `engine`, and what a name adds.  An engine is a process
that counts requests, so the series of several add up as those of vLLM's engines do.  They are true
totals: `vllm bench serve` adds up every line of a name.

A fact has one owner.  Where ours has labels that vLLM lacks, vLLM's family is their sum, made when
somebody reads it (`IMITATED`); the others are recorded under vLLM's name (`RECORDED`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from functools import partial

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from cluster import metrics
from cluster.metrics.metric import Metric, counter, gauge, histogram
from cluster.records import frozen

PREFIX = "vllm:"

_TOKENS = tuple(float(m * 10**exponent) for exponent in range(6) for m in (1, 2, 5))
# By vLLM's bounds, and finer ones below them for small models.
_request_time = partial(
    histogram,
    buckets=(
        0.005,
        0.02,
        0.05,
        0.1,
        0.3,
        0.5,
        0.8,
        1.0,
        1.5,
        2.0,
        2.5,
        5.0,
        10.0,
        15.0,
        20.0,
        30.0,
        40.0,
        50.0,
        60.0,
        120.0,
        240.0,
        480.0,
        960.0,
        1920.0,
        7680.0,
    ),
)

KV_USAGE = gauge(
    "vllm:kv_cache_usage_perc",
    "Share of the targets' KV pages that requests hold, 0 to 1.",
)
CACHE_CONFIG = gauge(
    "vllm:cache_config_info",
    "1, with the KV cache of all targets: tokens per page, and pages.",
    ("block_size", "num_gpu_blocks", "enable_prefix_caching"),
)
LORA_REQUESTS = gauge(
    "vllm:lora_requests_info",
    "The time of the scrape, with the adapters of running and waiting requests, between commas. "
    "There where adapters are served. max_lora: their number.",
    ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
)
CACHED_TOKENS = counter(
    "vllm:prompt_tokens_cached",
    "Those of drafthouse_prompt_tokens that the prefix cache had; of several samples, as the first "
    "one found it; of a scored prompt none.",
)
PREEMPTIONS = counter("vllm:num_preemptions", "Times that a text lost its KV pages to another one.")
TIME_PER_OUTPUT_TOKEN = histogram(
    "vllm:request_time_per_output_token_seconds",
    "Of a text that is over, the time from its first token to its last, per token after the first.",
    buckets=metrics.ITL.buckets,
)
E2E_TIME = _request_time("vllm:e2e_request_latency_seconds", "From a text's arrival to its end.")
QUEUE_TIME = _request_time(
    "vllm:request_queue_time_seconds", "From a text's arrival to its place at a target."
)
PREFILL_TIME = _request_time(
    "vllm:request_prefill_time_seconds", "From a text's place at a target to its first token."
)
DECODE_TIME = _request_time(
    "vllm:request_decode_time_seconds", "From a text's first token to its last."
)
INFERENCE_TIME = _request_time(
    "vllm:request_inference_time_seconds", "From a text's place at a target to its last token."
)
REQUEST_PROMPT_TOKENS = histogram(
    "vllm:request_prompt_tokens",
    "Of a request that is over, its drafthouse_prompt_tokens.",
    buckets=_TOKENS,
)
REQUEST_GENERATION_TOKENS = histogram(
    "vllm:request_generation_tokens",
    "Of a request that is over, its drafthouse_output_tokens.",
    buckets=_TOKENS,
)
STEP_TOKENS = histogram(
    "vllm:iteration_tokens_total",
    "Tokens of a target's step: those of prompts that it read or scored, and those that it drew; "
    "what a beam search tries is left out.",
    buckets=(1.0, *(float(2**exponent) for exponent in range(3, 15))),
)

RECORDED = tuple(value for value in globals().values() if isinstance(value, Metric))


@frozen
class Imitation:
    """A family under vLLM's name: the sum of the series of one that is recorded.

    label: vLLM's label for our label `of`, "" = none.  words: vLLM's words for the values of ours,
    with which the series are there from the start; "" = what ours has no label for.
    """

    name: str
    source: Metric
    label: str = ""
    of: str = ""
    words: Mapping[str, str] = field(default_factory=dict)


IMITATED: tuple[Imitation, ...] = (
    Imitation("num_requests_running", metrics.RUNNING),
    Imitation("num_requests_waiting", metrics.QUEUED),
    # The other reason, which never occurs here, is as in vLLM.
    Imitation(
        "num_requests_waiting_by_reason",
        metrics.QUEUED,
        "reason",
        words={"": "capacity", "deferred": "deferred"},
    ),
    Imitation("prompt_tokens", metrics.PROMPT_TOKENS),
    Imitation("generation_tokens", metrics.OUTPUT_TOKENS),
    Imitation("prefix_cache_queries", metrics.PROMPT_TOKENS),
    Imitation("prefix_cache_hits", CACHED_TOKENS),
    Imitation(
        "request_success",
        metrics.REQUESTS,
        "finished_reason",
        "finish_reason",
        {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"},
    ),
    Imitation("spec_decode_num_drafts", metrics.SPEC_STEPS),
    Imitation("spec_decode_num_draft_tokens", metrics.NUM_DRAFT_TOKENS),
    Imitation("spec_decode_num_accepted_tokens", metrics.NUM_ACCEPTED_TOKENS),
    Imitation(
        "spec_decode_num_accepted_tokens_per_pos",
        metrics.NUM_ACCEPTED_PER_POS,
        "position",
        "position",
    ),
    Imitation("time_to_first_token_seconds", metrics.TTFT),
    Imitation("inter_token_latency_seconds", metrics.ITL),
)


def imitate(families: Mapping[str, Family]) -> Iterator[Family]:
    """Yield the imitations of those of `families`, by name, that are there."""
    for each in IMITATED:
        source = families.get(each.source.name)
        if source is not None:
            yield _sum_of(each, source)


def _sum_of(imitation: Imitation, source: Family) -> Family:
    """Add up the series of `source`; what vLLM shows from the start is there as 0."""
    label, words = imitation.label, imitation.words
    empty = replace(
        imitation.source, name=PREFIX + imitation.name, labels=(label,) if label else ()
    ).series()
    for word in words.values():
        empty.labels(word)
    (family,) = empty.collect()
    sums = {(each.name, frozenset(each.labels.items())): each.value for each in family.samples}
    for sample in source.samples:
        ours = sample.labels.get(imitation.of, "")
        labels = {label: words.get(ours, ours)} if label else {}
        if bound := sample.labels.get("le"):
            labels["le"] = bound
        key = family.name + sample.name.removeprefix(source.name), frozenset(labels.items())
        sums[key] = sums.get(key, 0.0) + sample.value
    family.samples = [Sample(name, dict(own), value) for (name, own), value in sums.items()]
    return family
