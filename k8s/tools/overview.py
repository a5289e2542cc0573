"""How much is asked, how long it takes, and what drafts bring."""

from __future__ import annotations

from cluster import metrics
from cluster.metrics import vllm_metrics
from k8s.tools.capacity import REQUESTS_AT_ONCE
from k8s.tools.panels import Dashboard, Graph, Row
from k8s.tools.query import gauge, or_zero, quantiles, rate, share
from k8s.tools.speculation import TOKENS_PER_STEP

_TRAFFIC = Row(
    "Traffic",
    [
        Graph(
            "Requests finished per second",
            "short",
            {"{{finish_reason}}": rate(metrics.REQUESTS, "finish_reason")},
            "By the reason why their text ended.",
        ),
        REQUESTS_AT_ONCE,
        Graph(
            "Requests refused per second",
            "short",
            {"{{code}}": or_zero(rate(metrics.REJECTED, "code"))},
            "By the error code that the client gets.",
        ),
        Graph(
            "Output tokens per second",
            "short",
            {"{{task}}": rate(metrics.OUTPUT_TOKENS, "task")},
            "By the task of the request.",
        ),
        Graph(
            "Prompt tokens per second",
            "short",
            {"{{task}}": rate(metrics.PROMPT_TOKENS, "task")},
            "By the task of the request; what the prefix cache had is among them.",
        ),
        Graph(
            "Prompt tokens from the prefix cache",
            "percentunit",
            {"of all prompt tokens": share(vllm_metrics.CACHED_TOKENS, metrics.PROMPT_TOKENS)},
            "They are not computed again.",
            most=1,
        ),
    ],
)

_LATENCY = Row(
    "Latency",
    [
        Graph(
            "Time to the first token",
            "s",
            quantiles(metrics.TTFT),
            "From a request's arrival.",
        ),
        Graph(
            "Time between tokens",
            "s",
            quantiles(metrics.ITL),
            "A step with drafts brings several tokens at once, which share its time.",
        ),
        Graph(
            "Time of a request",
            "s",
            quantiles(vllm_metrics.E2E_TIME),
            "From its arrival to its end.",
        ),
    ],
)

_DRAFTS = Row(
    "What drafts bring",
    [
        Graph(
            "Estimated speed-up",
            "short",
            {"{{target}}": gauge("max", metrics.SPEEDUP, "target")},
            "Against decoding without drafts. Below 1 they cost more time than they save.",
        ),
        Graph(
            "Plain steps per second",
            "short",
            {"{{why}}": or_zero(rate(metrics.PLAIN_STEPS, "why"))},
            "Steps without drafts of texts that could have had some, by reason (docs/metrics.md).",
        ),
        TOKENS_PER_STEP,
    ],
)

OVERVIEW = Dashboard(
    "overview",
    "Drafthouse: overview",
    "How much is asked, how long it takes, and what drafts bring.",
    [_TRAFFIC, _LATENCY, _DRAFTS],
)
