"""How full the installation is, and which of its parts are there."""

from __future__ import annotations

from cluster import metrics
from cluster.metrics import vllm_metrics
from k8s.tools.panels import Dashboard, Graph, Row
from k8s.tools.query import gauge, mean, or_zero, quantiles, rate

REQUESTS_AT_ONCE = Graph(
    "Requests at once",
    "short",
    {
        "decoded": gauge("sum", metrics.RUNNING),
        "in the queue": gauge("sum", metrics.QUEUED),
    },
    "A queue that grows means that more is asked than the targets can do.",
)

_MEMORY = Row(
    "Room",
    [
        Graph(
            "KV pages in use",
            "percentunit",
            {
                "{{role}} {{worker}}": " / ".join(
                    gauge("max", pages, "role", "worker")
                    for pages in (metrics.KV_PAGES_IN_USE, metrics.KV_PAGES_TOTAL)
                )
            },
            "By requests; pages that only the prefix cache keeps are free.",
            most=1,
        ),
        REQUESTS_AT_ONCE,
        Graph(
            "Time in the queue",
            "s",
            quantiles(vllm_metrics.QUEUE_TIME),
            "From a request's arrival to its place at a target.",
        ),
        Graph(
            "Texts that lost their KV pages to others",
            "short",
            {"per second": rate(vllm_metrics.PREEMPTIONS)},
            "Each is read again once there is room: lower max_running_sequences if it goes on.",
        ),
        Graph(
            "Requests that drafters hold",
            "short",
            {
                "{{drafter}} {{worker}}": or_zero(
                    gauge("max", metrics.DRAFTER_REQUESTS, "drafter", "worker")
                )
            },
            "Of drafters in the pool.",
        ),
        Graph(
            "Texts moved and steps refused",
            "short",
            {
                "moved to another target": rate(metrics.FAILOVERS),
                "steps without a KV cache": rate(metrics.CACHE_MISSES),
            },
            "Per second. Each is read again from its text.",
        ),
    ],
)

_ROUNDS = Row(
    "Rounds",
    [
        Graph(
            "Sequences per step",
            "short",
            {"mean": mean(metrics.BATCH_SIZE)} | quantiles(metrics.BATCH_SIZE),
            "Of decode steps.",
        ),
        Graph(
            "Time of a target's step",
            "s",
            {"{{target}}": mean(metrics.STEP_TIME, "target")},
            "Forward pass, drawing tokens, comparing them with the draft; mean.",
        ),
        Graph(
            "Time of the forward pass",
            "s",
            {"{{target}}": mean(metrics.FORWARD_TIME, "target")},
            "Mean.",
        ),
        Graph(
            "Round overhead",
            "s",
            quantiles(metrics.ROUND_OVERHEAD),
            "From one step to the next, without the forward pass and what residents drafted.",
        ),
        Graph(
            "Tokens per step",
            "short",
            {"mean": mean(vllm_metrics.STEP_TOKENS)} | quantiles(vllm_metrics.STEP_TOKENS),
            "Those of prompts that it read, and those that it emitted.",
        ),
        Graph(
            "Batch purity",
            "percentunit",
            {"mean": gauge("avg", metrics.BATCH_PURITY)},
            "Share of a step's texts that belong to their most frequent task.",
            most=1,
        ),
    ],
)

_PARTS = Row(
    "Parts",
    [
        Graph(
            "Targets",
            "short",
            {"up": gauge("max", metrics.TARGET_UP)},
            "Those that a coordinator has.",
        ),
        Graph(
            "Drafters",
            "short",
            {"{{drafter}}": gauge("max", metrics.DRAFTER_UP, "drafter")},
            "Connected replicas.",
        ),
        Graph(
            "Processes that did not answer a scrape",
            "short",
            {"{{role}}": gauge("max", metrics.MISSING_PROCESSES, "role")},
            "Their series are missing in it.",
        ),
        Graph(
            "What runs in a slower way than was wanted",
            "short",
            {"{{role}} {{worker}}": gauge("max", metrics.ENGINE_FALLBACKS, "role", "worker")},
            "/health says what and why.",
        ),
        Graph(
            "Bugs",
            "short",
            {"{{part}}": or_zero(rate(metrics.BOOKKEEPING_FAULTS, "part"))},
            "Errors per second in code that only learns from rounds. Please report them.",
        ),
    ],
)

CAPACITY = Dashboard(
    "capacity",
    "Drafthouse: capacity",
    "How full the installation is, and which of its parts are there.",
    [_MEMORY, _ROUNDS, _PARTS],
)
