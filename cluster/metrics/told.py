"""Counts what clients are told, as `usage` says it, for /metrics, /stats and the keys' accounts.

Whoever knows where texts end counts them: the ingress, and `cluster.local` in its own process.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from cluster import metrics
from cluster.metrics import Metric, vllm_metrics
from cluster.metrics.recorder import EVERY_METRIC, Recorder

INGRESS: tuple[Metric, ...] = (
    metrics.REJECTED, metrics.REQUESTS, metrics.KEY_TOKENS, metrics.PROMPT_TOKENS,
    metrics.OUTPUT_TOKENS, metrics.TOKEN_RATE, vllm_metrics.CACHED_TOKENS,
    vllm_metrics.REQUEST_PROMPT_TOKENS, vllm_metrics.REQUEST_GENERATION_TOKENS,
)  # fmt: skip
COORDINATOR = tuple(metric for metric in EVERY_METRIC if metric not in INGRESS)
# Of the texts of a request, the reason that counts for it: the first that there is.
_REASONS = ("error", "cancelled", "length", "stop")
_RATE_WINDOW_S = 10.0  # as metrics.TOKEN_RATE says


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of one request.  cached: of those of its prompts, the ones in the prefix cache."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


class Told:
    """The counts of one process."""

    def __init__(self, recorder: Recorder, clock: Callable[[], float] = time.monotonic) -> None:
        self.recorder = recorder
        self._clock = clock
        self._window, self._now, self._last = 0, Counter[str](), Counter[str]()
        for kind in ("prompt", "output"):
            recorder.tell(metrics.TOKEN_RATE, partial(self._rate, kind), kind=kind)

    def count(self, kind: str, metric: Metric, amount: int, **labels: str) -> None:
        """Count tokens of a kind, which is as in `Tokens`."""
        self._turn()
        self._now[kind] += amount
        self.recorder.add(metric, amount, **labels)

    def _rate(self, kind: str) -> float:
        self._turn()
        return self._last[kind] / _RATE_WINDOW_S

    def _turn(self) -> None:
        window = int(self._clock() / _RATE_WINDOW_S)
        if window != self._window:
            self._last = self._now if window == self._window + 1 else Counter()
            self._window, self._now = window, Counter()


class ToldRequest:
    """The counts of one request."""

    def __init__(self, told: Told, task: str, segment: str) -> None:
        self._told = told
        self._labels = {"task": task, "segment": segment}
        self.tokens = Tokens()

    def grow(self, tokens: Tokens) -> None:
        """Its client has been told so much so far."""
        former, self.tokens = self.tokens, tokens
        if tokens == former:
            return
        told, labels = self._told, self._labels
        told.count("prompt", metrics.PROMPT_TOKENS, tokens.prompt - former.prompt, **labels)
        told.count("cached", vllm_metrics.CACHED_TOKENS, tokens.cached - former.cached)
        told.count("output", metrics.OUTPUT_TOKENS, tokens.output - former.output, **labels)

    def refuse(self, code: str) -> None:
        """It was refused, with the code of an error."""
        self._told.recorder.add(metrics.REJECTED, code=code)

    def end(self, reasons: Collection[str]) -> None:
        """It is over.  reasons: of its texts, as `cluster.core.FinishReason` has them."""
        recorder, tokens = self._told.recorder, self.tokens
        reason = min(reasons, key=_REASONS.index)
        recorder.add(metrics.REQUESTS, 1, finish_reason=reason, **self._labels)
        if tokens.prompt:
            recorder.observe(vllm_metrics.REQUEST_PROMPT_TOKENS, tokens.prompt)
            recorder.observe(vllm_metrics.REQUEST_GENERATION_TOKENS, tokens.output)
