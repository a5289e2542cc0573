"""What is told of the present and of what happens: to who reads the metrics, and to the log."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from cluster import metrics
from cluster.coordinator.drafters import LEFT_ALONE, DrafterPool
from cluster.coordinator.present import Answered, Asked, Ended, Present, Stepped
from cluster.core import Request
from cluster.metrics import Metric, vllm_metrics
from cluster.requests.fields import PlainWhy
from cluster.rpc.messages import Load, TextVerdict
from cluster.spec import evidence
from cluster.spec.acceptance import AcceptanceModel, Group

log = logging.getLogger(__name__)

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
    for worker in (*present.seats.values(), *replicas):
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
    gauge(vllm_metrics.KV_USAGE, _kv_usage(present))
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


def _kv_usage(present: Present) -> float:
    """Return the share of the targets' pages that are in use."""
    loads = [seat.load for seat in present.seats.values()]
    return sum(each.pages_in_use for each in loads) / max(
        sum(each.pages_total for each in loads), 1
    )


# What metrics and the log are told of steps and texts, and of how much drafters are asked for.


# As in vLLM.
_INTERVAL_S = 10.0
_MAX_RECENT_STEPS = 512
_STEP_FIELDS = (
    "num_sequences",
    "num_nodes",
    "step_time_s",
    "forward_time_s",
    "period_s",
    "draft_time_s",
)


class Series:
    """Enters what happens into a recorder, and into one line of the log every ten seconds in which
    requests were served, as vLLM writes one.

    The line counts what targets do: tokens behind a stop string too.
    recent_steps: the last ones, oldest first, for status reports and benchmarks.
    """

    def __init__(self, present: Present) -> None:
        self._present, self._recorder = present, present.recorder
        self._begin_line(present.clock())
        self._mean_purity: float | None = None
        self.recent_steps: deque[dict[str, float]] = deque(maxlen=_MAX_RECENT_STEPS)
        self._num_commits: Counter[tuple[str, Group]] = Counter()  # by drafter and group
        self._since = 0.0
        present.listen(Asked, "metrics", self._enter_asked)
        present.listen(Answered, "metrics", self._enter_answers)
        present.listen(Ended, "metrics", self._enter_ends)
        present.listen(Stepped, "metrics", self._enter_steps)

    def _enter_answers(self, answers: Sequence[Answered]) -> None:
        tasks = []
        for each in answers:
            session, verdict = each.session, each.verdict
            request, num_kept = session.request, len(verdict.token_ids)
            if session.is_scored:  # its tokens are a prompt's
                self._num_prompt_tokens += num_kept
                continue
            tasks.append(request.task)
            self._num_output_tokens += num_kept
            if each.former_at is None:
                self._num_prompt_tokens += session.prompt_len
                ttft_s = each.at - session.arrived_at
                self._observe(metrics.TTFT, metrics.SEGMENT_TTFT, ttft_s, request)
            elif num_kept:
                interval_s = (each.at - each.former_at) / num_kept
                self._observe(metrics.ITL, metrics.SEGMENT_ITL, interval_s, request)
            if verdict.num_nodes:
                self._num_spec_steps += 1
                self._num_accepted += len(verdict.sources)
                self.credit(request, session.text.names, verdict)
            elif verdict.why:
                self._plain_steps[verdict.why] += 1
        if tasks:
            purity = max(tasks.count(task) for task in set(tasks)) / len(tasks)
            mean = purity if self._mean_purity is None else self._mean_purity
            self._mean_purity = mean + evidence.RECENT * (purity - mean)
            self._recorder.set(metrics.BATCH_PURITY, self._mean_purity)

    def _observe(self, metric: Metric, of_segment: Metric, value: float, request: Request) -> None:
        self._recorder.observe(metric, value, task=request.task)
        if request.segment:
            self._recorder.observe(of_segment, value, segment=request.segment)

    def credit(self, request: Request, names: Sequence[str], verdict: TextVerdict) -> None:
        """Count a verified tree of a text whose drafters have these names.

        A node of several drafters counts for one of them (`Text.owners`), so that the
        counts of all drafters add up to the totals; for the others it is a shared one.  The
        position of an accepted node in the metrics is its depth, from 0.
        """
        add, task, bits = self._recorder.add, request.task, verdict.sources.tolist()
        add(metrics.SPEC_STEPS, task=task)
        if request.segment:
            add(metrics.SEGMENT_DRAFT_TOKENS, verdict.num_nodes, segment=request.segment)
            add(metrics.SEGMENT_ACCEPTED_TOKENS, len(bits), segment=request.segment)
        columns = zip(names, verdict.verified, verdict.credited, strict=False)
        for place, (name, num_proposed, num_own) in enumerate(columns):
            if not num_proposed:
                continue
            depths = [depth for depth, owner in enumerate(verdict.owners) if owner == place]
            for metric, count in (
                (metrics.NUM_DRAFTS, 1),
                (metrics.NUM_DRAFT_TOKENS, num_own),
                (metrics.NUM_ACCEPTED_TOKENS, len(depths)),
                (metrics.NUM_SHARED_TOKENS, sum(each >> place & 1 for each in bits) - len(depths)),
            ):
                add(metric, count, drafter=name, task=task)
            for depth in depths:
                add(metrics.NUM_ACCEPTED_PER_POS, drafter=name, position=str(depth))

    def _enter_ends(self, ends: Sequence[Ended]) -> None:
        for each in ends:
            session = each.session
            if session.last_at is None or session.is_scored:
                continue
            prefill_s, decode_s = session.prefill_time_s, session.decode_time_s
            num_more = session.num_output_tokens - 1
            for metric, value in (
                (vllm_metrics.E2E_TIME, each.at - session.arrived_at),
                (vllm_metrics.QUEUE_TIME, session.queue_time_s),
                (vllm_metrics.PREFILL_TIME, prefill_s),
                (vllm_metrics.DECODE_TIME, decode_s),
                (vllm_metrics.INFERENCE_TIME, prefill_s + decode_s),
                (vllm_metrics.TIME_PER_OUTPUT_TOKEN, decode_s / num_more if num_more > 0 else 0.0),
            ):
                self._recorder.observe(metric, value)

    def _enter_steps(self, steps: Sequence[Stepped]) -> None:
        recorder = self._recorder
        for each in steps:
            report, target = each.report, each.target_id
            num_tokens = report.num_prompt_tokens + report.num_emitted_tokens
            recorder.add(metrics.STEPS, target=target)
            recorder.observe(metrics.STEP_TIME, report.step_time_s, target=target)
            recorder.observe(metrics.FORWARD_TIME, report.forward_time_s, target=target)
            recorder.observe(vllm_metrics.STEP_TOKENS, num_tokens)
            recorder.add(vllm_metrics.PREEMPTIONS, report.num_preempted)
            if report.num_sequences:
                recorder.observe(metrics.BATCH_SIZE, report.num_sequences)
            reads = report.num_prompt_tokens or report.num_prefill_tokens
            if report.period_s and report.num_sequences and not reads:
                self.recent_steps.append({name: getattr(report, name) for name in _STEP_FIELDS})
                outside_s = report.period_s - report.forward_time_s - report.draft_time_s
                recorder.observe(metrics.ROUND_OVERHEAD, max(outside_s, 0.0))

    def _enter_asked(self, asked: Sequence[Asked]) -> None:
        add = self._recorder.add
        for each in asked:
            labels = {"drafter": each.drafter, "task": each.task}
            self._num_commits[each.drafter, each.group] += 1
            add(metrics.DRAFTER_COMMITS, 1, **labels)
            add(metrics.DRAFT_DEMAND, each.num_nodes, **labels)
            if each.num_nodes and each.is_hit is not None:
                add(metrics.PRE_DRAFTED, 1, outcome="hit" if each.is_hit else "miss", **labels)

    def worth(self, now: float, acceptance: AcceptanceModel) -> defaultdict[str, float]:
        """Return the tokens per second that the trees of each drafter were good for, since the
        last call.

        They are those of its best few nodes, verified or not: a drafter that has too much to do to
        be in time is worth as much as one that has not.
        """
        elapsed_s, self._since = now - self._since, now
        per_s: defaultdict[str, float] = defaultdict(float)
        for (drafter, group), count in self._num_commits.items():
            tokens = count * acceptance.known(drafter, group).accepted_of_few()
            per_s[drafter] += tokens / elapsed_s if elapsed_s > 0.0 else 0.0
        self._num_commits.clear()
        return per_s

    # The line of the log

    def _begin_line(self, now: float) -> None:
        self._line_since = now
        self._num_prompt_tokens = self._num_output_tokens = 0
        self._num_spec_steps = self._num_accepted = 0
        # Those that could have had drafts, by their reason.
        self._plain_steps: Counter[PlainWhy] = Counter()

    def tick(self, now: float, load: Load) -> None:
        """Write the line if it is time for one; to be called twice a second or so.

        load: the coordinator's own."""
        elapsed_s = now - self._line_since
        if elapsed_s < _INTERVAL_S:
            return
        if self._num_prompt_tokens + self._num_output_tokens + load.num_running + load.num_waiting:
            log.info(
                "running %d requests, waiting %d, prompt %.1f tokens/s, output %.1f tokens/s, "
                "mean acceptance length %.2f, plain steps %s, KV cache %.1f %%",
                load.num_running,
                load.num_waiting,
                self._num_prompt_tokens / elapsed_s,
                self._num_output_tokens / elapsed_s,
                1.0 + self._num_accepted / max(self._num_spec_steps, 1),
                self._plain_share(),
                100.0 * _kv_usage(self._present),
            )
        self._begin_line(now)

    def _plain_share(self) -> str:
        """The plain steps among all that could have had drafts, with the reasons."""
        num_plain = self._plain_steps.total()
        share = num_plain / max(num_plain + self._num_spec_steps, 1)
        whys = [f"{why.name.lower()} {count}" for why, count in self._plain_steps.most_common()]
        return f"{share:.0%}" + (f" ({', '.join(whys)})" if whys else "")
