"""The target's side of a round: engine steps, draws and walks, per text.

The engine may have lost tokens that it held; then the text has no verdict, and its next work brings
them again.  A text that cannot be served is refused alone.  The caller cuts off tokens beyond a
stop or max_tokens.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cluster.core import EMPTY_TREE, Clock, SamplingParams, TokenArray, TokenTree
from cluster.draft.inside import WANTS_NOTHING, StepRows, StepWants
from cluster.engine.beam_search import BeamRun
from cluster.engine.cpu import kernels
from cluster.engine.draw.batch import BatchDraws, no_law, walk_by_ratio
from cluster.engine.work import Drawn, Output, Verdict, Work
from cluster.errors import DrafthouseError, RequestError, WorkerError
from cluster.grammar.text import GrammarHook
from cluster.records import record
from cluster.rpc.messages import StepReport
from cluster.spec.draw import FusedDraw
from cluster.spec.tree import walk_draws
from cluster.worker.step_rows import (
    TargetSequence,
    logprobs_of,
    rows_of_step,
)
from cluster.worker.texts import TargetText

if TYPE_CHECKING:
    from cluster.engine.engine import Engine

# If the engine forgets a text so often without a verdict in between, the text is given up.
_MAX_MISSES_IN_A_ROW = 16

# Makes the logits hook of a text; None = it has none.
OpenHook = Callable[[TargetText], GrammarHook | None]
# Returns the work that must precede a text, which runs beside the steps; None = there is none.
Prepare = Callable[[SamplingParams], Future[Any] | None]


@record
class StepAnswers:
    """The answers of a step; each text is in one of the three collections, but a search that goes
    on in none.

    missed: texts of which the engine had lost tokens, which are read again from their logs.
    refused: texts that cannot be served, by their ids.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    refused: dict[str, DrafthouseError] = field(default_factory=dict)
    report: StepReport = field(default_factory=StepReport)


class Verifier:
    """Verifies trees of texts.  Synchronous; one thread calls it.

    last_rows: the rows of the last step for the drafters that read them; empty if none does.
    drawn_by: the implementation of draws on a GPU, "triton" or "torch".
    prepare: texts wait for what it gives; if that fails, their first step meets the same error.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock = time.perf_counter,
        open_hook: OpenHook = lambda text: None,
        prepare: Prepare = lambda params: None,
        wants: StepWants = WANTS_NOTHING,
        num_top: Callable[[TargetText], int] | None = None,
    ) -> None:
        """wants: the rows of every step that the drafters inside the target read.  num_top: of each
        text at most wants.num_top; None = so many of all."""
        self.last_rows: Sequence[StepRows] = ()
        self.prepare = prepare
        self._wants = wants
        self._num_top = num_top or (lambda text: wants.num_top)
        self._engine, self.pace = engine, engine.pace
        self._open_hook = open_hook
        self._clock = clock
        self._native = kernels.load() if engine.device.type == "cpu" else None
        self._fused = fused_draw(engine.device, engine.vocab_size)
        self.drawn_by = "torch" if self._fused is None else "triton"
        self._sequences: dict[str, TargetSequence] = {}
        self._num_beam_rows = 0  # in the engine's answers of the present step
        self._ahead: dict[str, Output] = {}  # the engine's answers of the next step

    @property
    def has_pending(self) -> bool:
        """True if `step` has something to do."""
        return bool(self._ahead) or self._engine.has_pending

    @property
    def ahead(self) -> list[TargetText]:
        """The texts whose next step runs already, without drafts; `step` answers these."""
        return [self._sequences[name].text for name in self._ahead]

    def submit(self, asked: Sequence[tuple[TargetText, TokenTree]]) -> dict[str, DrafthouseError]:
        """Queue texts, each with a sound tree that continues it; `step` answers them.

        Returns those that cannot be served, by their ids, and why.
        """
        refused: dict[str, DrafthouseError] = {}
        for text, tree in asked:
            try:
                sequence = self._sequences.get(text.id) or self._open(text)
                sequence.begin(tree)
                self._queue(sequence)
                self._sequences[text.id] = sequence
            except DrafthouseError as error:
                refused[text.id] = error
        self.release(refused)
        return refused

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these texts, and what was queued of them.  Unknown ids are ignored.

        Their adapters are freed later, because a text may come back in another generation."""
        for request_id in request_ids:
            sequence = self._sequences.pop(request_id, None)
            self._ahead.pop(request_id, None)
            if sequence is not None:
                sequence.text.held_len = 0
                self._engine.release(request_id)

    def step(self, ahead: Sequence[TargetText] = ()) -> StepAnswers:
        """Run one forward over the texts that the engine picks; answers each completed one.

        ahead: texts of this step whose next one has no drafts: where the engine can, and this one
        has no drafts either, it begins before the host knows what this one draws (`ahead`)."""
        started_at = self._clock()
        self.last_rows, self._num_beam_rows = (), 0
        found = StepAnswers()
        batch: list[TargetSequence] = []
        begun, self._ahead = self._ahead, {}
        for output in begun.values() or self._engine.step(self._wants.taps):
            sequence = self._sequences[output.request_id]
            try:
                if begun:
                    sequence.begin(EMPTY_TREE)
            except DrafthouseError as error:  # of its own hook
                found.refused[output.request_id] = error
                continue
            if sequence.search is not None:
                self._search(sequence, output, found)
            elif output.error is not None:
                found.refused[output.request_id] = output.error
            elif output.logits is not None:
                sequence.output, sequence.logits = output, output.logits
                batch.append(sequence)
            else:
                self._read_again(sequence, output, found)
        draws = BatchDraws(batch, self._native, self._fused)
        end_next = self._begin_next(ahead, batch, draws)
        for sequence, drawn in zip(batch, draws.taken(), strict=True):
            try:
                verdict = sequence.verdict = self._conclude(sequence, drawn)
            except (WorkerError, RequestError) as error:
                found.refused[sequence.text.id] = error
                continue
            if sequence.kept is not None:
                verdict = replace(verdict, path=sequence.kept[verdict.path])
            found.verdicts.append(verdict)
        self.release(found.refused)
        report, taps = self._report(started_at, batch), self._engine.last_step.taps
        self.last_rows = rows_of_step(self._wants, taps, self._sequences.values())
        if end_next is not None:
            end_next()
        for sequence in batch:
            sequence.forget_step()
        self._engine.drop_unused_adapters()
        return replace(found, report=report)

    # The step behind the present one, where it begins before the host knows what this one draws.
    # Its texts bring a token each, which goes from the draw to the forward on the device.

    def _begin_next(
        self, texts: Sequence[TargetText], batch: Sequence[TargetSequence], draws: BatchDraws
    ) -> Callable[[], None] | None:
        """Begin the next step of these texts, if one draw is all that is asked of each in this one:
        what else is would wait behind it.  Returns what ends it, once there are verdicts."""
        if (
            not (texts and self._engine.runs_ahead)
            or len(draws.token_ids) != len(batch)
            or self._wants.num_top
            or any(len(each.tree) or each.params.logprobs is not None for each in batch)
        ):
            return None
        # Of those alone that have an answer: the engine may have lost tokens of the others.
        names = {text.id for text in texts}
        going = [each for each in batch if each.text.id in names]
        works = [self._work(each, len(each.text.tokens), np.zeros(1, np.int32)) for each in going]
        drawn = Drawn(draws.token_ids, {each.text.id: each.start for each in going})
        finish = self._engine.run_ahead(works, drawn, self._wants.taps)
        if finish is None:
            return None

        def end() -> None:
            """Tell the engine what was drawn.  A text has no part in the step if another token was
            drawn on the host than on the device."""
            lost = set[str]()
            for sequence, work in zip(going, works, strict=True):
                if sequence.verdict is not None:
                    work.delta[0] = sequence.verdict.token_ids[-1]
                if sequence.verdict is None or draws.on_device[sequence.start] != work.delta[0]:
                    lost.add(work.request_id)
            outputs = [each for each in finish(lost) if each.request_id not in lost]
            self._ahead = {each.request_id: each for each in outputs}

        return end

    def _queue(self, sequence: TargetSequence) -> None:
        text, search = sequence.text, sequence.search
        delta = text.tokens.since(text.held_len)
        work = search.work() if search else self._work(sequence, text.held_len, delta)
        self._engine.submit(work)

    def _read_again(self, sequence: TargetSequence, output: Output, found: StepAnswers) -> None:
        """Queue what the engine has lost with the rest of its work."""
        name = output.request_id
        sequence.num_misses += 1
        if sequence.num_misses > _MAX_MISSES_IN_A_ROW:
            found.refused[name] = WorkerError("the engine cannot keep the text's context")
            return
        found.missed.append(name)
        sequence.text.held_len = output.have_len or 0
        self._queue(sequence)

    def _work(self, sequence: TargetSequence, held_len: int, delta: TokenArray) -> Work:
        """The work for the text's tokens behind those that the engine holds, and for its tree."""
        text = sequence.text
        return Work(
            text.id,
            held_len,
            delta,
            sequence.tree,
            0,
            text.tokens.hash_at(held_len),
            text.opened.tenant,
            self._num_top(text),
            adapter=sequence.adapter,
        )

    def _open(self, text: TargetText) -> TargetSequence:
        engine, hook, params = self._engine, self._open_hook(text), text.params
        adapter = engine.adapters.index_of(text.opened.adapter)
        sequence = TargetSequence(text, engine.vocab_size, engine.device, hook, adapter)
        if params.beams is not None:
            # A search depends on its text alone: if it is lost, it begins again.
            params = replace(params, max_tokens=min(params.max_tokens, text.remaining))
            tokens, tenant = text.tokens.token_ids, text.opened.tenant
            sequence.search = BeamRun(text.id, tokens, params, engine.limits, tenant, adapter)
        return sequence

    def _conclude(self, sequence: TargetSequence, draws: TokenArray | None) -> Verdict:
        """Walk the tree, keep the accepted nodes' KV, and return the verdict.  Raises WorkerError
        for broken logits, RequestError if the request's own hook cannot go on."""
        text = sequence.text
        if sequence.failure is not None:
            raise sequence.failure
        path, token_ids = (
            walk_by_ratio(sequence, text.laws)
            if draws is None
            else walk_draws(sequence.tree, draws)
        )
        context_len = len(text.tokens)
        if token_ids[-1] < 0:
            raise no_law(context_len + len(path))
        if len(sequence.tree):
            self._engine.retain(text.id, path.tolist())
        text.held_len = context_len + len(path)
        logprobs = logprobs_of(sequence, path, token_ids)
        return Verdict(
            text.id,
            context_len,
            path,
            token_ids,
            logprobs,
            sequence.output.num_cached,
            redraws=sequence.redraws,
        )

    def _search(self, sequence: TargetSequence, output: Output, found: StepAnswers) -> None:
        """Continue a beam search; if it is over, add its answer."""
        text, search = sequence.text, sequence.search
        assert search is not None
        if output.top is not None:
            self._num_beam_rows += len(output.top.token_ids)
        try:
            search.take(output, self._engine)
            if not search.is_done:
                text.held_len = len(text.tokens)  # for what a step is to read
                self._queue(sequence)
                return
            found.verdicts.append(search.verdict())
        except RequestError as error:
            found.refused[text.id] = error
        self.release([text.id])

    def _report(self, started_at: float, batch: Sequence[TargetSequence]) -> StepReport:
        engine = self._engine
        # A given output is read as a prompt is, in rows of its own.
        drawn = [each for each in batch if not each.text.is_scored]
        num_scored = sum(each.num_tokens for each in batch if each.text.is_scored)
        return StepReport(
            step_time_s=self._clock() - started_at,
            forward_time_s=engine.last_step.forward_time_s,
            num_sequences=len(drawn),
            num_nodes=sum(len(each.tree) for each in drawn),
            num_rows=engine.last_step.num_rows,
            num_prompt_tokens=engine.last_step.num_prompt_rows + num_scored,
            # Beams' rows make a step as long as a chunk's.
            num_prefill_tokens=engine.last_step.num_prefill_rows + self._num_beam_rows,
            pages_in_use=engine.pages_in_use,
            pages_total=engine.pages_total,
            num_emitted_tokens=sum(each.num_tokens for each in drawn),
            num_preempted=engine.last_step.num_preempted,
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
