"""The target's side of a round: engine steps, draws and walks, per item.

If the engine's cache lacks tokens that an item relies on, the answer is a cache miss, not an error,
and the item is sent again with the missing tokens.  A malformed item is refused alone.  The caller
cuts off tokens beyond a stop or max_tokens.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from cluster.core import TokenArray, TokenLogprob, Verdict, VerifyItem
from cluster.draft.inside import WANTS_NOTHING, StepRows, StepWants
from cluster.engine.adapters import Adapters
from cluster.engine.cpu import kernels
from cluster.engine.work import Output, StepSummary, Work
from cluster.errors import (
    DrafthouseError,
    ProtocolError,
    RequestError,
    WorkerError,
)
from cluster.messages import Refusal, StepReport
from cluster.spec.draw import FusedDraw
from cluster.spec.logits_hook import LogitsHook
from cluster.spec.logprobs import token_logprobs
from cluster.spec.noise_torch import NoiseRows
from cluster.spec.params import check_params
from cluster.spec.tree_check import are_sound, check_tree
from cluster.spec.verify import walk_draws
from cluster.worker.beams import BeamEngine, Beams
from cluster.worker.item_check import CacheMiss, check_item, refusal
from cluster.worker.step_rows import rows_of_step
from cluster.worker.target_sequence import Evaluated, TargetSequence, draw_all, possible

Answer = Refusal | CacheMiss
# Makes the logits hook of a request from the item that opens it; None = the request has no hook.
OpenHook = Callable[[VerifyItem], LogitsHook | None]


class EngineLike(BeamEngine, Protocol):
    """The part of `cluster.engine.engine.Engine` that the verifier uses."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def has_pending(self) -> bool: ...
    @property
    def adapters(self) -> Adapters: ...
    @property
    def last_step(self) -> StepSummary: ...
    @property
    def pages_in_use(self) -> int: ...
    @property
    def pages_total(self) -> int: ...
    def step(self, taps: Sequence[int] = ()) -> list[Output]: ...
    def release(self, request_id: str) -> None: ...
    def cached_len(self, request_id: str) -> int: ...
    def drop_unused_adapters(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """An item that the engine has not answered yet.

    item: its tree has only the nodes that may be drawn.  kept: the places of these nodes in the
    tree that was sent, None = all.
    """

    item: VerifyItem
    kept: TokenArray | None


@dataclass(frozen=True, slots=True, eq=False)
class Stepped:
    """The answers of a step; each item is in one of the three lists."""

    verdicts: Sequence[Verdict] = ()
    misses: Sequence[CacheMiss] = ()
    refusals: Sequence[Refusal] = ()
    report: StepReport = field(default_factory=StepReport)


class Verifier:
    """Turns items into verdicts.  Synchronous; one thread calls it.

    last_rows: the rows of the last step for the drafters that read them; empty if none does.
    """

    def __init__(
        self,
        engine: EngineLike,
        clock: Callable[[], float] = time.perf_counter,
        open_hook: OpenHook = lambda item: None,
        wants: StepWants = WANTS_NOTHING,
    ) -> None:
        """wants: the rows of every step that the drafters inside the target read."""
        self.last_rows: Sequence[StepRows] = ()
        self._wants = wants
        self._engine = engine
        self._open_hook = open_hook
        self._clock = clock
        self._noise = NoiseRows(engine.vocab_size, engine.device)
        native = kernels.load() if engine.device.type == "cpu" else None
        self._native = None if native is None else native.draws
        self._fused = fused_draw(engine.device, engine.vocab_size)
        self._sequences: dict[str, TargetSequence] = {}
        self._pending: dict[str, _Pending] = {}
        self._beams = Beams(engine)

    @property
    def drawn_by(self) -> str:
        """The implementation of draws on a GPU: "triton" or "torch"."""
        return "torch" if self._fused is None else "triton"

    @property
    def has_pending(self) -> bool:
        """True if `step` has something to do."""
        return self._engine.has_pending

    def submit(self, items: Sequence[VerifyItem]) -> list[Answer]:
        """Queue `items`.  Returns the answers that are known at once; `step` gives the others."""
        answers: list[Answer] = []
        are_trees_sound = are_sound([item.tree for item in items], None, self._engine.vocab_size)
        for item in items:
            try:
                if not are_trees_sound:
                    check_tree(item.tree, self._engine.vocab_size)
                self._admit(item, answers)
            except DrafthouseError as error:
                answers.append(refusal(item, error))
        self._engine.drop_unused_adapters()
        return answers

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these requests; their queued items get no answer.  Unknown ids are ignored.

        Their adapters are freed later, because a request may come back in another generation."""
        for request_id in request_ids:
            self._forget(request_id)

    def step(self) -> Stepped:
        """Run one forward over the items that the engine picks; answers each completed item."""
        started_at = self._clock()
        self.last_rows = ()
        outputs = self._engine.step(self._wants.taps)
        answered: list[tuple[_Pending, Output]] = []
        misses: list[CacheMiss] = []
        refusals: list[Refusal] = []
        batch: list[Evaluated] = []
        verdicts: list[Verdict] = []
        for output in outputs:
            if output.request_id in self._beams:
                self._search(output, verdicts, refusals)
                continue
            pending = self._pending.pop(output.request_id, None)
            if pending is None:
                continue  # released in the meantime
            sequence = self._sequences[output.request_id]
            item = pending.item
            if output.logits is not None:
                answered.append((pending, output))
                batch.append(Evaluated(sequence, item.tree, output.logits))
            elif output.error is not None:
                refusals.append(refusal(item, output.error))
                self._forget(item.request_id)
            else:
                misses.append(self._miss(item, sequence, output.have_len or 0))
        concluded: list[tuple[VerifyItem, TargetSequence, Output, Verdict]] = []
        draws = draw_all(batch, self._noise, self._native, self._fused) if batch else []
        for (pending, output), entry, drawn in zip(answered, batch, draws, strict=True):
            try:
                verdict = self._conclude(pending.item, entry, drawn, output.num_cached)
                concluded.append((pending.item, entry.sequence, output, verdict))
                if pending.kept is not None:
                    verdict = replace(verdict, path=pending.kept[verdict.path])
                verdicts.append(verdict)
            except (WorkerError, RequestError) as error:
                refusals.append(refusal(pending.item, error))
                self._forget(pending.item.request_id)
        report = self._report(started_at, batch)
        unfinished = [
            (each.item, self._sequences[name])
            for name, each in self._pending.items()
            if name not in self._beams
        ]
        taps = self._engine.last_step.taps
        self.last_rows = rows_of_step(self._wants, taps, concluded, unfinished)
        self._engine.drop_unused_adapters()
        return Stepped(verdicts, misses, refusals, report)

    def _admit(self, item: VerifyItem, answers: list[Answer]) -> None:
        """Queue one item, or answer with a cache miss; raises if the item is unacceptable."""
        check_item(item, self._engine.vocab_size)
        known = self._sequences.get(item.request_id)
        if known is not None and item.generation < known.generation:
            raise ProtocolError(
                f"generation {item.generation} of request {item.request_id} is stale; "
                f"generation {known.generation} owns it"
            )
        opened = self._open(item) if item.base_len == 0 else None
        if known is not None and item.generation > known.generation:
            self._hand_over(item, answers)
            known = None
        if item.request_id in self._pending:
            raise ProtocolError(
                f"request {item.request_id} has an unanswered item; send one at a time"
            )
        sequence = opened or known
        have_len = item.base_len if opened else self._have_len(item, known)
        if sequence is None or have_len < item.base_len:
            answers.append(CacheMiss(item.request_id, item.generation, have_len))
            return
        sequence.extend(item.base_len, item.delta)
        tree, kept = possible(sequence, item.tree)
        if sequence.params.beams is not None:
            work = self._beams.open(item, sequence.adapter)
        else:
            work = Work(
                item.request_id, item.base_len, item.delta, tree, 0, item.prefix_hash, item.tenant,
                self._wants.num_top, adapter=sequence.adapter,
            )  # fmt: skip
        self._engine.submit(work)
        self._sequences[item.request_id] = sequence
        possible_item = item if kept is None else replace(item, tree=tree)
        self._pending[item.request_id] = _Pending(possible_item, kept)

    def _hand_over(self, item: VerifyItem, answers: list[Answer]) -> None:
        """Drop the state of an older generation of the item's request."""
        pending = self._pending.get(item.request_id)
        if pending is not None:
            error = ProtocolError(f"generation {item.generation} took the request over")
            answers.append(refusal(pending.item, error))
        self._forget(item.request_id)

    def _have_len(self, item: VerifyItem, sequence: TargetSequence | None) -> int:
        """Return how many tokens are here already, as far as that is known before the step."""
        if sequence is None:
            return 0
        if item.prompt_len != sequence.prompt_len:
            raise ProtocolError(
                f"prompt_len is {item.prompt_len}, the request was opened with "
                f"{sequence.prompt_len}"
            )
        if item.base_len <= sequence.context_len:
            return item.base_len  # only the engine knows if they are still cached
        return min(sequence.context_len, self._engine.cached_len(item.request_id))

    def _open(self, item: VerifyItem) -> TargetSequence:
        if item.params is None:
            raise ProtocolError("an item with base_len 0 opens the request and must bring params")
        if item.prefix_hash != 0:
            raise ProtocolError(f"prefix_hash is {item.prefix_hash}; that of no tokens is 0")
        check_params(item.params, self._engine.vocab_size)
        engine, hook = self._engine, self._open_hook(item)
        adapter = engine.adapters.index_of(item.adapter)
        return TargetSequence(item, item.params, engine.vocab_size, engine.device, hook, adapter)

    def _miss(self, item: VerifyItem, sequence: TargetSequence, have_len: int) -> CacheMiss:
        # The lost part is sent again, with its tokens.
        sequence.extend(min(have_len, sequence.context_len), item.delta[:0])
        return CacheMiss(item.request_id, item.generation, have_len)

    def _conclude(
        self, item: VerifyItem, entry: Evaluated, draws: TokenArray, num_cached: int
    ) -> Verdict:
        """Walk the tree, keep the accepted nodes' KV, and return the verdict.  Raises WorkerError
        for broken logits, RequestError if the request's own hook cannot go on."""
        if entry.sequence.failure is not None:
            raise entry.sequence.failure
        path, token_ids = walk_draws(item.tree, draws)
        if token_ids[-1] < 0:
            raise WorkerError(
                f"the target's logits after {item.context_len + len(path)} tokens have no finite "
                "maximum; the model or its dtype overflows, or everything is banned"
            )
        self._engine.retain(item.request_id, path.tolist())
        entry.sequence.extend(item.context_len, token_ids[:-1])
        logprobs = _logprobs(entry, path, token_ids)
        return Verdict(
            item.request_id, item.generation, item.context_len, path, token_ids, logprobs,
            num_cached,
        )  # fmt: skip

    def _search(self, output: Output, verdicts: list[Verdict], refusals: list[Refusal]) -> None:
        """Continue a beam search; if it is over, add its answer."""
        item = self._pending[output.request_id].item
        try:
            verdict = self._beams.take(item, output)
            if verdict is None:
                return
            verdicts.append(verdict)
        except RequestError as error:
            refusals.append(refusal(item, error))
        self._forget(item.request_id)

    def _forget(self, request_id: str) -> None:
        self._pending.pop(request_id, None)
        self._beams.forget(request_id)
        if self._sequences.pop(request_id, None) is not None:
            self._engine.release(request_id)

    def _report(self, started_at: float, batch: Sequence[Evaluated]) -> StepReport:
        engine = self._engine
        return StepReport(
            step_time_s=self._clock() - started_at,
            forward_time_s=engine.last_step.forward_time_s,
            num_sequences=len(batch),
            num_nodes=sum(len(entry.tree) for entry in batch),
            # Beams' rows make a step as long as a chunk's.
            num_prefill_tokens=engine.last_step.num_prefill_rows + self._beams.take_num_rows(),
            pages_in_use=engine.pages_in_use,
            pages_total=engine.pages_total,
        )

    @property
    def pages(self) -> tuple[int, int]:
        """Free the adapters without requests; returns (KV pages in use, KV pages in total)."""
        self._engine.drop_unused_adapters()
        return self._engine.pages_in_use, self._engine.pages_total


def fused_draw(device: torch.device, vocab_size: int) -> FusedDraw | None:
    """Return the draw in one kernel, ready to run; None if device or installation lack it."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from cluster.engine.draw.triton import create_draw

    return create_draw(device, vocab_size)


def _logprobs(
    entry: Evaluated, path: TokenArray, token_ids: TokenArray
) -> tuple[TokenLogprob, ...]:
    num_top = entry.sequence.params.logprobs
    if num_top is None:
        return ()
    rows = torch.from_numpy(np.concatenate(([0], path + 1)).astype(np.int64))
    return token_logprobs(entry.logits[rows.to(entry.logits.device)], token_ids, num_top)
