"""The target's side of a round: engine steps, draws and walks, per text.

The engine may have lost tokens that it held; then the text has no verdict, and its next work brings
them again.  A text that cannot be served is refused alone.  The caller cuts off tokens beyond a
stop or max_tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.core import EMPTY_TREE, Clock, TokenArray, TokenTree, Verdict
from cluster.draft.inside import WANTS_NOTHING, StepRows, StepWants
from cluster.engine.cpu import kernels
from cluster.engine.work import Drawn, Finish, Output, Work
from cluster.errors import DrafthouseError, RequestError, WorkerError
from cluster.messages import Open, StepReport
from cluster.records import record
from cluster.spec.logits_hook import LogitsHook
from cluster.spec.tree import walk_draws
from cluster.worker.step_rows import (
    Answered,
    beam_verdict,
    logprobs_of,
    open_search,
    rows_of_step,
    walk_by_ratio,
)
from cluster.worker.target_sequence import (
    NO_LOGITS,
    BatchDraws,
    TargetSequence,
    fused_draw,
    no_law,
)
from cluster.worker.texts import TargetText

if TYPE_CHECKING:
    from cluster.engine.engine import Engine

# Makes the logits hook of a text; None = it has none.
OpenHook = Callable[[TargetText], LogitsHook | None]
# Returns the work that must precede a text, which runs beside the steps; None = there is none.
Prepare = Callable[[Open], Future[Any] | None]


@record
class StepAnswers:
    """The answers of a step; each text is in one of the three collections.

    missed: texts of which the engine had lost tokens.  refused: texts that cannot be served, by
    their ids.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    refused: dict[str, DrafthouseError] = field(default_factory=dict)
    report: StepReport = field(default_factory=StepReport)


class Verifier:
    """Verifies trees of texts.  Synchronous; one thread calls it.

    last_rows: the rows of the last step for the drafters that read them; empty if none does.
    prepare: texts wait for what it gives; if that fails, their first step meets the same error.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock = time.perf_counter,
        open_hook: OpenHook = lambda text: None,
        prepare: Prepare = lambda opened: None,
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
        self._sequences: dict[str, TargetSequence] = {}
        self._num_beam_rows = 0  # in the engine's answers of the present step
        self._ahead: dict[str, Output] = {}  # the engine's answers of the next step

    @property
    def drawn_by(self) -> str:
        """The implementation of draws on a GPU: "triton" or "torch"."""
        return "torch" if self._fused is None else "triton"

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
                self._admit(text, tree)
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
        outputs: list[Output] = []
        batch: list[TargetSequence] = []
        begun, self._ahead = self._ahead, {}
        for output in begun.values() or self._engine.step(self._wants.taps):
            name = output.request_id
            sequence = self._sequences[name]
            sequence.is_pending = False
            if begun:
                sequence.begin(EMPTY_TREE)
            if sequence.search is not None:
                self._search(sequence, output, found)
            elif output.logits is not None:
                outputs.append(output)
                batch.append(sequence)
                sequence.logits = output.logits
            elif output.error is not None:
                found.refused[name] = output.error
            else:
                sequence.text.held_len = output.have_len or 0
                found.missed.append(name)
        answered: list[Answered] = []
        draws = BatchDraws(batch, self._native, self._fused)
        works, finish = self._begin_next(ahead, batch, draws)
        for sequence, output, drawn in zip(batch, outputs, draws.taken(), strict=True):
            try:
                verdict = self._conclude(sequence, drawn, output.num_cached)
            except (WorkerError, RequestError) as error:
                found.refused[output.request_id] = error
                continue
            answered.append((sequence, output, verdict))
            if sequence.kept is not None:
                verdict = replace(verdict, path=sequence.kept[verdict.path])
            found.verdicts.append(verdict)
        for sequence in batch:
            sequence.logits = NO_LOGITS  # nobody is to keep a step's rows in memory
        self.release(found.refused)
        report = self._report(started_at, batch, answered)
        taps = self._engine.last_step.taps
        self.last_rows = rows_of_step(self._wants, taps, answered, self._sequences.values())
        if finish is not None:
            self._end_next(works, finish, answered, draws)
        self._engine.drop_unused_adapters()
        return replace(found, report=report)

    # The step behind the present one, where it begins before the host knows what this one draws.
    # Its texts bring a token each, which goes from the draw to the forward on the device.

    def _begin_next(
        self, texts: Sequence[TargetText], batch: Sequence[TargetSequence], draws: BatchDraws
    ) -> tuple[dict[str, Work], Finish | None]:
        """Begin the next step of these texts, if one draw is all that is asked of each in this one:
        what else is would wait behind it.  Returns its works, and what ends it."""
        if (
            not (texts and self._engine.runs_ahead)
            or len(draws.token_ids) != len(batch)
            or self._wants.num_top
            or any(len(each.tree) or each.params.logprobs is not None for each in batch)
        ):
            return {}, None
        # Of those alone that have an answer: the engine may have lost tokens of the others.
        names = {text.id for text in texts}
        going = [each for each in batch if each.text.id in names]
        works = {
            each.text.id: self._work(each, len(each.text.tokens), np.zeros(1, np.int32))
            for each in going
        }
        rows = {each.text.id: each.start for each in going}
        drawn = Drawn(draws.token_ids, rows)
        return works, self._engine.run_ahead([*works.values()], drawn, self._wants.taps)

    def _end_next(
        self,
        works: dict[str, Work],
        finish: Finish,
        answered: Sequence[Answered],
        draws: BatchDraws,
    ) -> None:
        """Tell the engine what was drawn.  A text has no part in the step if another token was
        drawn on the host than on the device."""
        for sequence, _, verdict in answered:
            work, token = works.get(sequence.text.id), verdict.token_ids[-1]
            if work is not None and draws.on_device[sequence.start] == token:
                work.delta[0] = token
                del works[sequence.text.id]
                sequence.is_pending = True
        outputs = {each.request_id: each for each in finish(works)}
        self._ahead = {name: each for name, each in outputs.items() if name not in works}

    def _admit(self, text: TargetText, tree: TokenTree) -> None:
        """Queue one text; raises if it cannot be served."""
        sequence = self._sequences.get(text.id) or self._open(text)
        assert sequence.text is text, "a text that another replaces is released first"
        assert not sequence.is_pending, "a text has one step at a time"
        sequence.begin(tree)
        if sequence.search is not None:
            work = sequence.search.work()
        else:
            work = self._work(sequence, text.held_len, text.tokens.since(text.held_len))
        self._engine.submit(work)
        sequence.is_pending = True
        self._sequences[text.id] = sequence

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
        engine, hook, beams = self._engine, self._open_hook(text), text.params.beams
        adapter = engine.adapters.index_of(text.opened.adapter)
        sequence = TargetSequence(text, engine.vocab_size, engine.device, hook, adapter)
        if beams is not None:
            sequence.search = open_search(text, beams, adapter, engine)
        return sequence

    def _conclude(
        self, sequence: TargetSequence, draws: TokenArray | None, num_cached: int
    ) -> Verdict:
        """Walk the tree, keep the accepted nodes' KV, and return the verdict.  Raises WorkerError
        for broken logits, RequestError if the request's own hook cannot go on."""
        text = sequence.text
        if sequence.failure is not None:
            raise sequence.failure
        path, token_ids = (
            walk_by_ratio(sequence) if draws is None else walk_draws(sequence.tree, draws)
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
            num_cached,
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
                self._engine.submit(search.work())
                sequence.is_pending = True
                return
            found.verdicts.append(beam_verdict(text, search))
        except RequestError as error:
            found.refused[text.id] = error
        self.release([text.id])

    def _report(
        self, started_at: float, batch: Sequence[TargetSequence], answered: Sequence[Answered]
    ) -> StepReport:
        engine = self._engine
        # A given output is read as a prompt is, in rows of its own.
        drawn = [each for each in batch if not each.text.is_scored]
        num_tokens = Counter[bool]()  # whether they were drawn
        for sequence, _, verdict in answered:
            num_tokens[not sequence.text.is_scored] += len(verdict.token_ids)
        return StepReport(
            step_time_s=self._clock() - started_at,
            forward_time_s=engine.last_step.forward_time_s,
            num_sequences=len(drawn),
            num_nodes=sum(len(each.tree) for each in drawn),
            num_rows=engine.last_step.num_rows,
            num_prompt_tokens=engine.last_step.num_prompt_rows + num_tokens[False],
            # Beams' rows make a step as long as a chunk's.
            num_prefill_tokens=engine.last_step.num_prefill_rows + self._num_beam_rows,
            pages_in_use=engine.pages_in_use,
            pages_total=engine.pages_total,
            num_emitted_tokens=num_tokens[True],
            num_preempted=engine.last_step.num_preempted,
        )

    @property
    def pages(self) -> tuple[int, int]:
        """Free the adapters without requests; returns (KV pages in use, KV pages in total)."""
        self._engine.drop_unused_adapters()
        return self._engine.pages_in_use, self._engine.pages_total
