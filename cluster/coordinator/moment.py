"""What the metrics are told of the moment at which somebody reads them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from cluster import metrics
from cluster.config.schema import Config
from cluster.coordinator.session import Status
from cluster.coordinator.sessions import SessionTable
from cluster.messages import AdapterList
from cluster.metrics import vllm_metrics
from cluster.metrics.recorder import Recorder


def record_moment(
    recorder: Recorder,
    config: Config,
    table: SessionTable,
    drafters: Sequence[Mapping[str, object]],
    adapters: AdapterList | None,
) -> None:
    """Set the gauges that are counted only when somebody asks.

    drafters: name, state of the breaker, and when the weights were written, of each replica.
    adapters: that are served.
    """
    recorder.set(metrics.RUNNING, table.num_running)
    recorder.set(metrics.QUEUED, table.num_waiting)
    recorder.set(metrics.TARGET_UP, len(table.seats))
    recorder.clear(metrics.BREAKERS_OPEN)
    recorder.clear(metrics.DRAFTER_AGE)
    for name in {str(each["name"]) for each in drafters}:
        own = [each for each in drafters if each["name"] == name]
        if oldest := min((float(str(each["written_at"])) for each in own), default=0.0):
            recorder.set(metrics.DRAFTER_AGE, time.time() - oldest, drafter=name)
        states = [each["breaker"] for each in own]
        num_open = sum(state in ("open", "resting") for state in states)
        recorder.set(metrics.BREAKERS_OPEN, num_open, drafter=name)
    _record_pages(recorder, config, table)
    recorder.clear(vllm_metrics.LORA_REQUESTS)
    if adapters is not None and adapters.served:
        recorder.set(
            vllm_metrics.LORA_REQUESTS,
            time.time(),
            max_lora=str(len(adapters.served)),
            waiting_lora_adapters=_adapters(table, is_waiting=True),
            running_lora_adapters=_adapters(table, is_waiting=False),
        )


def _record_pages(recorder: Recorder, config: Config, table: SessionTable) -> None:
    loads = [seat.load for seat in table.seats.values()]
    num_pages = sum(load.pages_total for load in loads)
    used = sum(load.pages_in_use for load in loads)
    recorder.set(vllm_metrics.KV_USAGE, used / num_pages if num_pages else 0.0)
    engine = config.target.engine
    recorder.clear(vllm_metrics.CACHE_CONFIG)
    recorder.set(
        vllm_metrics.CACHE_CONFIG,
        1,
        block_size=str(engine.page_size),
        num_gpu_blocks=str(num_pages),
        enable_prefix_caching=str(engine.prefix_cache),
    )


def _adapters(table: SessionTable, *, is_waiting: bool) -> str:
    """Return the names of the adapters of the requests that wait for a target, or have one."""
    names = {
        # Without the digest of its content, which only parts of one release share.
        session.request.adapter.partition("@")[0]
        for session in table.sessions.values()
        if (session.status is Status.WAITING) is is_waiting
    }
    return ",".join(sorted(names - {""}))
