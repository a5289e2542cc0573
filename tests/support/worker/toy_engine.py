"""An engine without a network: its law is a pure function of the path.

It keeps the bookkeeping of the real one (committed tokens, live nodes, misses, one pending work
per request), so the verifier's tests run in milliseconds.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from cluster.core import TokenTree
from cluster.engine.adapters import Adapter, Adapters
from cluster.engine.schedule.scheduler import PromptPace
from cluster.engine.work import Drawn, Finish, Output, StepSummary, Work
from cluster.errors import RequestError
from cluster.spec.token_log import prefix_hash
from tests.support.spec.trees import path_to

Law = Callable[[Sequence[int]], np.ndarray]
VOCAB_SIZE = 32


def hashed_law(vocab_size: int) -> Law:
    """Logits that look random and depend on every token of the context."""

    def logits(context: Sequence[int]) -> np.ndarray:
        generator = np.random.default_rng(prefix_hash(context))
        return (generator.standard_normal(vocab_size) * 2.0).astype(np.float32)

    return logits


class ToyEngine:
    """Serves `law` through the engine's seam."""

    def __init__(
        self,
        law: Law | None = None,
        vocab_size: int = VOCAB_SIZE,
        max_context_len: int = 4096,
        works_per_step: int = 1000,
        runs_ahead: bool = True,
    ) -> None:
        self.law = law or hashed_law(vocab_size)
        self.vocab_size = vocab_size
        self.adapters = Adapters({1: Adapter("sql@1", {})}, {"sql": 1})
        self.max_context_len = max_context_len
        self.works_per_step = works_per_step
        self.device = torch.device("cpu")
        self.last_step = StepSummary()
        self.pages_total = 1000
        self.pace = PromptPace(512, 1.0)
        self.runs_ahead = runs_ahead
        self.num_ahead = 0  # steps that ran ahead
        self._begun: dict[str, Work] = {}  # works of the step that runs ahead
        self.contexts: dict[str, list[int]] = {}
        self._trees: dict[str, TokenTree] = {}
        self._queue: OrderedDict[str, Work] = OrderedDict()

    @property
    def has_pending(self) -> bool:
        return bool(self._queue)

    @property
    def pages_in_use(self) -> int:
        return sum(-(-len(context) // 16) for context in self.contexts.values())

    def submit(self, work: Work) -> None:
        assert work.request_id not in self._queue
        self._queue[work.request_id] = work

    def step(self, taps: Sequence[int] = ()) -> list[Output]:
        picked = [self._queue.popitem(last=False)[1] for _ in range(self._num_picked())]
        outputs = [self._evaluate(work) for work in picked]
        num_nodes = sum(len(work.tree) for work in picked)
        prompts = [work for work in picked if len(work.delta) > 1]
        self.last_step = StepSummary(
            num_rows=sum(len(work.delta) for work in picked) + num_nodes,
            num_prompt_rows=sum(len(work.delta) for work in prompts),
            num_sequences=len(picked),
            num_nodes=num_nodes,
        )
        return outputs

    def run_ahead(self, works: Sequence[Work], drawn: Drawn, taps: Sequence[int]) -> Finish | None:
        if self._queue:
            return None
        self._begun = {work.request_id: work for work in works}

        def finish(lost: Collection[str]) -> list[Output]:
            """Only now it runs; what a GPU has been told by then must have come true."""
            for name in self._begun.keys() - lost:
                work = self._begun[name]
                assert work.delta.tolist() == [drawn.token_ids[drawn.rows[name]]]
                self.submit(work)
            self.num_ahead += 1
            # It may have preempted them before it heard that they have no part in the step.
            return [*self.step(), *(Output(name, have_len=0) for name in lost)]

        return finish

    def _num_picked(self) -> int:
        return min(len(self._queue), self.works_per_step)

    def _evaluate(self, work: Work) -> Output:
        context = self.contexts.get(work.request_id, [])
        if work.base_len > len(context):
            return Output(work.request_id, have_len=len(context))
        context = context[: work.base_len]
        if work.prefix_hash is not None and prefix_hash(context) != work.prefix_hash:
            self.contexts.pop(work.request_id)
            return Output(work.request_id, have_len=0)
        if work.context_len + len(work.tree) > self.max_context_len:
            return Output(work.request_id, error=RequestError("the context is too long"))
        context = context + work.delta.tolist()
        self.contexts[work.request_id] = context
        self._trees[work.request_id] = work.tree
        rows = [self.law(context)]
        for node in range(len(work.tree)):
            path = [int(work.tree.token_ids[i]) for i in path_to(work.tree.parents, node)]
            rows.append(self.law(context + path))
        logits = torch.from_numpy(np.stack(rows))
        return Output(work.request_id, logits=logits, top=work.top(logits))

    def retain(self, request_id: str, path: Sequence[int]) -> None:
        tree = self._trees.pop(request_id)
        assert list(path) == path_to(tree.parents, path[-1] if path else -1)
        self.contexts[request_id] += [int(tree.token_ids[node]) for node in path]

    def release(self, request_id: str) -> None:
        self._queue.pop(request_id, None)
        self._begun.pop(request_id, None)
        self.contexts.pop(request_id, None)
        self._trees.pop(request_id, None)

    def cached_len(self, request_id: str) -> int:
        return len(self.contexts.get(request_id, []))

    def drop_unused_adapters(self) -> None:
        pass

    def close(self) -> None:
        pass

    def lose(self, request_id: str) -> None:
        """Preemption: the cache goes, the request lives."""
        self.contexts.pop(request_id, None)
