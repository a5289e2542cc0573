"""What the metrics are told of the moment at which somebody reads them."""

from __future__ import annotations

import time
from collections.abc import Iterator

from cluster import metrics
from cluster.coordinator.engines import record_workers
from cluster.coordinator.present import Present
from cluster.coordinator.replicas import DrafterReplicas
from cluster.messages import AdapterList
from cluster.metrics import Metric, vllm_metrics

_CLEARED = (
    metrics.BREAKERS_OPEN,
    metrics.DRAFTER_AGE,
    metrics.DRAFTER_REQUESTS,
    vllm_metrics.CACHE_CONFIG,
    vllm_metrics.LORA_REQUESTS,
)


def drafter_states(present: Present, replicas: DrafterReplicas) -> list[dict[str, object]]:
    """The pool's replicas, and the residents of each target."""
    now = present.clock()
    residents = (one for seat in present.seats.values() for one in seat.resident_states())
    return [*(replica.status(now) for replica in replicas), *residents]


def record_moment(
    present: Present, replicas: DrafterReplicas, adapters: AdapterList | None
) -> None:
    """Set the gauges that are counted only when somebody asks.  adapters: that are served."""
    record_workers(present.recorder, (*present.seats.values(), *replicas))
    for metric in _CLEARED:
        present.recorder.clear(metric)
    for metric, value, labels in _of_texts(present, adapters):
        present.recorder.set(metric, value, **labels)
    for metric, value, labels in _of_drafters(present, replicas):
        present.recorder.set(metric, value, **labels)


Gauges = Iterator[tuple[Metric, float, dict[str, str]]]


def _of_drafters(present: Present, replicas: DrafterReplicas) -> Gauges:
    for name in replicas.seen:
        yield metrics.DRAFTER_UP, replicas.num_up(name), {"drafter": name}
    for each in replicas:
        if each.num_requests is not None:
            labels = {"drafter": each.name, "worker": each.id}
            yield metrics.DRAFTER_REQUESTS, each.num_requests, labels
    states = drafter_states(present, replicas)
    for name in {str(each["name"]) for each in states}:
        own = [each for each in states if each["name"] == name]
        if oldest := min(float(str(each["written_at"])) for each in own):
            yield metrics.DRAFTER_AGE, time.time() - oldest, {"drafter": name}
        num_open = sum(each["breaker"] in ("open", "resting") for each in own)
        yield metrics.BREAKERS_OPEN, num_open, {"drafter": name}


def _of_texts(present: Present, adapters: AdapterList | None) -> Gauges:
    seats, sessions = present.seats.values(), present.sessions.values()
    num_running = sum(each.target is not None for each in sessions)
    yield metrics.RUNNING, num_running, {}
    yield metrics.QUEUED, len(sessions) - num_running, {}
    yield metrics.TARGET_UP, len(seats), {}
    num_pages = sum(seat.load.pages_total for seat in seats)
    used = sum(seat.load.pages_in_use for seat in seats)
    yield vllm_metrics.KV_USAGE, used / max(num_pages, 1), {}
    engine = present.config.target.engine
    cache = {
        "block_size": str(engine.page_size),
        "num_gpu_blocks": str(num_pages),
        "enable_prefix_caching": str(engine.prefix_cache),
    }
    yield vllm_metrics.CACHE_CONFIG, 1, cache
    if adapters is not None and adapters.served:
        # Without the digest of its content, which only parts of one release share.
        named = [(each.target is None, each.request.adapter.partition("@")[0]) for each in sessions]
        waiting, running = (
            ",".join(sorted({name for waits, name in named if waits is wanted and name}))
            for wanted in (True, False)
        )
        labels = {
            "max_lora": str(len(adapters.served)),
            "waiting_lora_adapters": waiting,
            "running_lora_adapters": running,
        }
        yield vllm_metrics.LORA_REQUESTS, time.time(), labels
