"""What is told of the present: to who reads the metrics, and to the log every ten seconds."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

from cluster import metrics
from cluster.coordinator.drafters import LEFT_ALONE, DrafterPool
from cluster.coordinator.present import Answered, Present
from cluster.coordinator.replica import DrafterReplica
from cluster.coordinator.targets import TargetSeat
from cluster.messages import Load
from cluster.metrics import vllm_metrics
from cluster.requests.fields import PlainWhy

_CLEARED = (
    metrics.BREAKERS_OPEN,
    metrics.DRAFTER_AGE,
    metrics.DRAFTER_REQUESTS,
    metrics.ENGINE,
    metrics.ENGINE_FALLBACKS,
    metrics.KV_PAGES_IN_USE,
    metrics.KV_PAGES_TOTAL,
    vllm_metrics.CACHE_CONFIG,
    vllm_metrics.LORA_REQUESTS,
)


def record_moment(present: Present, replicas: DrafterPool) -> None:
    """Set the gauges that are counted only when somebody asks."""
    for metric in _CLEARED:
        present.recorder.clear(metric)
    _record_texts(present)
    gauge, states = present.recorder.set, replicas.states()
    workers: tuple[TargetSeat | DrafterReplica, ...] = (*present.seats.values(), *replicas)
    for worker in workers:
        own = {"role": worker.description.role, "worker": worker.id}
        if worker.pages is not None:
            gauge(metrics.KV_PAGES_IN_USE, worker.pages[0], **own)
            gauge(metrics.KV_PAGES_TOTAL, worker.pages[1], **own)
        for engine in worker.description.engines:
            labels = {"engine": engine.name, **own}
            gauge(metrics.ENGINE_FALLBACKS, len(engine.fallbacks), **labels)
            told = ("device", "attention", "graphs", "kernels", "weights")
            gauge(metrics.ENGINE, 1, **labels, **{name: getattr(engine, name) for name in told})
    for name in replicas.seen:
        known = [each for each in states if each["name"] == name]
        gauge(metrics.DRAFTER_UP, len(known), drafter=name)
        if not known:
            continue
        if oldest := min(each["written_at"] for each in known):
            gauge(metrics.DRAFTER_AGE, time.time() - oldest, drafter=name)
        num_open = sum(each["breaker"] in LEFT_ALONE for each in known)
        gauge(metrics.BREAKERS_OPEN, num_open, drafter=name)
    for replica in replicas:
        labels = {"drafter": replica.name, "worker": replica.id}
        gauge(metrics.DRAFTER_REQUESTS, replica.num_requests, **labels)


def _record_texts(present: Present) -> None:
    gauge, seats = present.recorder.set, present.seats.values()
    # Of each session whether it waits, and its adapter, without the digest of its content, which
    # only parts of one release share.
    sessions = [
        (not each.target_id, each.request.adapter.partition("@")[0])
        for each in present.sessions.values()
    ]
    num_waiting = sum(waits for waits, _ in sessions)
    gauge(metrics.RUNNING, len(sessions) - num_waiting)
    gauge(metrics.QUEUED, num_waiting)
    gauge(metrics.TARGET_UP, len(seats))
    num_pages = sum(seat.load.pages_total for seat in seats)
    gauge(
        vllm_metrics.KV_USAGE,
        sum(seat.load.pages_in_use for seat in seats) / max(num_pages, 1),
    )
    engine = present.config.target.engine
    gauge(
        vllm_metrics.CACHE_CONFIG,
        1,
        block_size=str(engine.page_size),
        num_gpu_blocks=str(num_pages),
        enable_prefix_caching=str(engine.prefix_cache),
    )
    adapters = present.adapters
    if adapters is not None and adapters.served:
        waiting, running = (
            ",".join(sorted({name for waits, name in sessions if waits is wanted and name}))
            for wanted in (True, False)
        )
        gauge(
            vllm_metrics.LORA_REQUESTS,
            time.time(),
            max_lora=str(len(adapters.served)),
            waiting_lora_adapters=waiting,
            running_lora_adapters=running,
        )


# The coordinator's lines in the log: one every ten seconds while there is work.


log = logging.getLogger(__name__)

# As in vLLM.
_INTERVAL_S = 10.0


class ActivityLog:
    """One line every ten seconds in which requests were served, as vLLM writes one.

    It counts what targets do: tokens behind a stop string too.
    """

    def __init__(self, now: float) -> None:
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._since = now
        self._num_prompt_tokens = self._num_output_tokens = 0
        self._num_spec_steps = self._num_accepted = 0
        # Those that could have had drafts, by their reason.
        self._plain_steps: Counter[PlainWhy] = Counter()

    def hear(self, answers: Sequence[Answered]) -> None:
        """Count the shares of texts in steps."""
        for each in answers:
            session, verdict = each.session, each.verdict
            if session.is_scored:  # its tokens are a prompt's
                self._num_prompt_tokens += len(verdict.token_ids)
                continue
            if each.former_at is None:
                self._num_prompt_tokens += session.prompt_len
            self._num_output_tokens += len(verdict.token_ids)
            if verdict.num_nodes:
                self._num_spec_steps += 1
                self._num_accepted += len(verdict.sources)
            elif verdict.why:
                self._plain_steps[verdict.why] += 1

    def tick(self, now: float, own: Load, targets: Sequence[Load]) -> None:
        """Write the line if it is time for one; to be called twice a second or so.

        own: how busy the coordinator is.  targets: how busy they are.
        """
        elapsed_s = now - self._since
        if elapsed_s < _INTERVAL_S:
            return
        num_tokens = self._num_prompt_tokens + self._num_output_tokens
        if num_tokens or own.num_running + own.num_waiting:
            total = sum(each.pages_total for each in targets)
            log.info(
                "running %d requests, waiting %d, prompt %.1f tokens/s, output %.1f tokens/s, "
                "mean acceptance length %.2f, plain steps %s, KV cache %.1f %%",
                own.num_running,
                own.num_waiting,
                self._num_prompt_tokens / elapsed_s,
                self._num_output_tokens / elapsed_s,
                1.0 + self._num_accepted / max(self._num_spec_steps, 1),
                self._plain_share(),
                100.0 * sum(each.pages_in_use for each in targets) / max(total, 1),
            )
        self._begin(now)

    def _plain_share(self) -> str:
        """The plain steps among all that could have had drafts, with the reasons."""
        num_plain = self._plain_steps.total()
        share = num_plain / max(num_plain + self._num_spec_steps, 1)
        whys = [f"{why.name.lower()} {count}" for why, count in self._plain_steps.most_common()]
        return f"{share:.0%}" + (f" ({', '.join(whys)})" if whys else "")
