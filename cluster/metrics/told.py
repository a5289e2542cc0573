"""Counts what clients are told, as `usage` says it, for /metrics, /stats and the keys' accounts.

The ingress counts it, for it alone knows where texts end, and which of them are one request's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from cluster import metrics
from cluster.metrics import vllm_metrics
from cluster.metrics.recorder import EVERY_METRIC, Recorder

_METRICS = {
    "prompt": metrics.PROMPT_TOKENS,
    "cached": vllm_metrics.CACHED_TOKENS,
    "output": metrics.OUTPUT_TOKENS,
}
# Whose metrics are whose.
INGRESS = (
    *_METRICS.values(),
    *(metrics.REJECTED, metrics.REQUESTS, metrics.KEY_TOKENS, metrics.TOKEN_RATE),
    *(vllm_metrics.REQUEST_PROMPT_TOKENS, vllm_metrics.REQUEST_GENERATION_TOKENS),
)
_OF_STEPS = (metrics.DEFICIT, metrics.SPEEDUP, metrics.PLAIN_STEPS, metrics.CACHE_MISSES)
COORDINATOR = tuple(metric for metric in EVERY_METRIC if metric not in (*INGRESS, *_OF_STEPS))
# Coordinators record the others too, of the pool's drafters.
TARGET = (
    *_OF_STEPS,
    *(metrics.BOOKKEEPING_FAULTS, metrics.CALIBRATION_ERROR, metrics.EXPECTED_ACCEPTED),
    *(metrics.ROLLOUT_PHASE, metrics.ROLLOUT_LEAD, metrics.ROLLOUT_CHANGES),
    *(metrics.DRAFT_TIME, metrics.DRAFT_DEMAND, metrics.DRAFTER_REQUESTS, metrics.DRAFTER_FAULTS),
    *(metrics.KV_PAGES_IN_USE, metrics.KV_PAGES_TOTAL),
)
# Of the texts of a request, the reason that counts for it: the first that there is.
_REASONS = ("error", "cancelled", "length", "stop")
_RATE_WINDOW_S = 10.0  # as metrics.TOKEN_RATE says
# By kind: prompt, cached (of those of prompt, the ones in the prefix cache), output.
Tokens = Counter[str]


class Told:
    """The counts of one process."""

    def __init__(self, recorder: Recorder, clock: Callable[[], float] = time.monotonic) -> None:
        self.recorder = recorder
        self._clock = clock
        self._window, self._now, self._last = 0, Tokens(), Tokens()
        for kind in ("prompt", "output"):
            recorder.tell(metrics.TOKEN_RATE, partial(self._rate, kind), kind=kind)

    def count(self, tokens: Tokens, labels: Mapping[str, str]) -> None:
        """Clients have been told these."""
        self._turn()
        self._now += tokens
        for kind, amount in tokens.items():
            metric = _METRICS[kind]
            self.recorder.add(metric, amount, **{name: labels[name] for name in metric.labels})

    def _rate(self, kind: str) -> float:
        self._turn()
        return self._last[kind] / _RATE_WINDOW_S

    def _turn(self) -> None:
        window = int(self._clock() / _RATE_WINDOW_S)
        if window != self._window:
            self._last = self._now if window == self._window + 1 else Tokens()
            self._window, self._now = window, Tokens()


class ToldRequest:
    """The counts of one request."""

    def __init__(self, told: Told, task: str, segment: str) -> None:
        self._told = told
        self._labels = {"task": task, "segment": segment}
        self.tokens = Tokens()

    def grow(self, tokens: Tokens) -> None:
        """Its client has been told so much so far."""
        self._told.count(tokens - self.tokens, self._labels)
        self.tokens = tokens

    def end(self, reasons: Iterable[str], error_code: str = "") -> None:
        """It is over.  reasons: of its texts, as `cluster.core.FinishReason` has them.
        error_code: of the error that ended it."""
        recorder, tokens = self._told.recorder, self.tokens
        if error_code and not tokens:
            recorder.add(metrics.REJECTED, code=error_code)
            return
        reason = min(reasons, key=_REASONS.index)
        recorder.add(metrics.REQUESTS, 1, finish_reason=reason, **self._labels)
        if tokens:
            recorder.observe(vllm_metrics.REQUEST_PROMPT_TOKENS, tokens["prompt"])
            recorder.observe(vllm_metrics.REQUEST_GENERATION_TOKENS, tokens["output"])
