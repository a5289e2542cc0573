"""An engine whose forward takes a given time and computes nothing; all other parts are real.

The text is fixed: the token at position p is a function of p, with a period that look-ups learn
from the prompt.  Logits have the width of a real vocabulary, so draws have their real cost.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from cluster.core import TokenArray, TokenTree
from cluster.engine.adapters import Adapters
from cluster.engine.schedule.scheduler import PromptPace
from cluster.engine.work import Drawn, EngineLimits, Output, StepSummary, Work
from cluster.spec.tree import depths

VOCAB_SIZE = 49152
PERIOD = 64
_MAX_LEN = 1 << 20
_SPUN_BYTES = b"\0" * (1 << 15)


def asleep(seconds: float) -> None:
    """Wait as for a GPU: the core is free."""
    time.sleep(seconds)


def spinning(seconds: float) -> None:
    """Wait as for a CPU: the core is busy, but the interpreter's lock is free."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        hashlib.sha256(_SPUN_BYTES).digest()


def text(start: int, count: int) -> TokenArray:
    """The tokens at positions [start, start + count)."""
    places = np.arange(start, start + count) % PERIOD
    return ((places * 7919 + 101) % VOCAB_SIZE).astype(np.int32)


class NullEngine:
    """An engine as a verifier needs one.

    steps: for each step its beginning and end, the number of works it answered and their nodes.
    """

    runs_ahead = False

    def __init__(self, forward: Callable[[float], None], forward_s: float) -> None:
        self.vocab_size = VOCAB_SIZE
        self.max_context_len = self.longest_context = _MAX_LEN
        self.device = torch.device("cpu")
        self.adapters = Adapters({}, {})
        self.last_step = StepSummary()
        self.pace = PromptPace(max_rows=512, max_chunk_s=0.2)  # the defaults of an engine
        self.limits = EngineLimits(VOCAB_SIZE, _MAX_LEN, (), (), 512)
        self.pages_in_use, self.pages_total = 0, 1
        self.steps: list[tuple[float, float, int, int]] = []
        self._forward = forward
        self._forward_s = forward_s
        self._lengths: dict[str, int] = {}
        self._trees: dict[str, TokenTree] = {}
        self._queue: dict[str, Work] = {}
        # Twice the period: the rows of a chain are a slice of it, which costs nothing.
        laws = np.full((2 * PERIOD, VOCAB_SIZE), -10.0, dtype=np.float32)
        laws[np.arange(2 * PERIOD), text(0, 2 * PERIOD)] = 10.0
        self._laws = torch.from_numpy(laws)

    @property
    def has_pending(self) -> bool:
        return bool(self._queue)

    def close(self) -> None:
        """Nothing is held."""

    def submit(self, work: Work) -> None:
        self._queue[work.request_id] = work

    def step(self, taps: Sequence[int] = ()) -> list[Output]:
        began = time.perf_counter()
        works, self._queue = list(self._queue.values()), {}
        self._forward(self._forward_s)
        ended = time.perf_counter()
        outputs = [self._answer(work) for work in works]
        num_nodes = sum(len(work.tree) for work in works)
        self.steps.append((began, ended, len(works), num_nodes))
        self.last_step = StepSummary(
            num_rows=len(works) + num_nodes,
            num_prefill_rows=sum(len(work.delta) for work in works if len(work.delta) > PERIOD),
            num_sequences=len(works),
            num_nodes=num_nodes,
            forward_time_s=ended - began,
        )
        return outputs

    def _answer(self, work: Work) -> Output:
        length = self._lengths[work.request_id] = work.context_len
        self._trees[work.request_id] = work.tree
        deep, start = depths(work.tree.parents), length % PERIOD
        if deep.tolist() == list(range(1, len(deep) + 1)):
            return Output(work.request_id, self._laws[start : start + len(deep) + 1])
        places = (np.concatenate(([0], deep)) + start) % PERIOD
        return Output(work.request_id, self._laws[torch.from_numpy(places)])

    def run_ahead(self, works: Sequence[Work], drawn: Drawn, taps: Sequence[int]) -> None:
        """Its steps take turns with all else."""

    def retain(self, request_id: str, path: Sequence[int], keep: Sequence[int] = ()) -> None:
        self._lengths[request_id] += len(path)

    def release(self, request_id: str) -> None:
        self._queue.pop(request_id, None)
        self._lengths.pop(request_id, None)
        self._trees.pop(request_id, None)

    def cached_len(self, request_id: str) -> int:
        return self._lengths.get(request_id, 0)

    def drop_unused_adapters(self) -> None:
        return
