"""The target owns its steps: one engine thread, and any number of coordinators.

    while (mail := mailbox.take()) is not None:    # opens, cancels, pool trees
        apply(mail)
        choice = choose(ready texts)               # the control loop's nodes, of what is at hand
        stepped = verifier.step()                  # one forward, draws, walks
        commit and post(stepped)                   # verdicts leave first
        residents.draft()                          # by turns with the forward
        learn()

A step begins as soon as a text is ready; what is not there yet joins a later one.  Nothing here
waits for a coordinator or a drafter of the pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cluster import metrics
from cluster.errors import WorkerError
from cluster.messages import (
    StepReport,
    TextVerdict,
    VerdictFrame,
)
from cluster.metrics.recorder import Recorder
from cluster.metrics.told import TARGET
from cluster.plan.controller import Controller, any_sampled
from cluster.plan.fence import Fence
from cluster.plan.in_flight import PLAIN, InFlight, Moment, Plan, Round
from cluster.requests.acceptance_law import NO_LAWS
from cluster.requests.plain_why import PlainWhy
from cluster.spec.budget import NO_DRAFTS, Ask
from cluster.worker.containment import Containment
from cluster.worker.draft_steps import with_step
from cluster.worker.residents import NOTHING_DRAFTED, ResidentDrafter, Residents
from cluster.worker.target_stream import Mail, Mailbox, TargetStream, TargetStreams
from cluster.worker.text_keeper import TextKeeper
from cluster.worker.texts import TargetText, TextTable
from cluster.worker.verified import laws_of_verified
from cluster.worker.verifier import Stepped, Verifier

log = logging.getLogger(__name__)


class StepLoop:
    """The target without its network side.  The engine thread calls `run`, which calls the rest."""

    def __init__(
        self,
        verifier: Verifier,
        residents: Residents,
        controller: Controller,
        streams: TargetStreams,
        texts: TextTable,
        mailbox: Mailbox,
        *,
        worker_id: str,
        max_batch_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._verifier = verifier
        self._residents = residents
        self._controller = controller
        self._streams = streams
        self._texts = texts
        self._mailbox = mailbox
        self._worker_id = worker_id
        self._max_rows = max_batch_tokens
        self._clock = clock
        for drafter in residents:
            controller.scores.meet(drafter.name, drafter.model.model_hash)
        self.recorder = Recorder(worker_id, TARGET)
        fence = Fence(self.recorder)
        self._keeper = TextKeeper(
            verifier, residents, controller, streams, texts, self.recorder, fence
        )
        self._faults = Containment(verifier, self._keeper, texts, streams)
        self._planning, self._learning = fence.section("planning"), fence.section("rounds")
        self._scoring = fence.section("scores")
        self._drafted = NOTHING_DRAFTED  # after the last step
        self._asked = NO_DRAFTS  # the ask that led to it
        self._began_at = 0.0  # start of the last step; 0 = the next one does not follow at once
        self._settled_s = 0.0  # time of the work after the last step, without drafting

    def run(self) -> None:
        """Serve until the mailbox is closed."""
        try:
            while (mail := self._mailbox.take(is_busy=self.has_work)) is not None:
                self.turn(mail)
        except BaseException as error:
            log.critical("engine thread ended", exc_info=True)
            self._faults.break_off(
                WorkerError(f"the target's engine thread ended: {type(error).__name__}")
            )
            raise
        finally:
            self._mailbox.close()  # so that nobody waits for a thread that has ended

    def turn(self, mail: Sequence[Mail]) -> None:
        """Apply the mail, and make a step if there is something to do."""
        self._keeper.apply(mail)
        if self.has_work:
            self._step()
        else:
            self._began_at = 0.0

    @property
    def broken(self) -> WorkerError | None:
        """The error after which the engine cannot be used any more; None = it can."""
        return self._faults.broken

    @property
    def has_work(self) -> bool:
        """True if a text is ready or the engine has unfinished work."""
        if self.broken is not None:
            return False
        return self._verifier.has_pending or any(_is_ready(text) for text in self._texts.values())

    # A step

    def _step(self) -> None:
        began_at = self._clock()
        period_s, self._began_at = began_at - self._began_at if self._began_at else 0.0, began_at
        batch = self._batch()
        for text in batch:
            text.was_decoding = text.is_decoding
        decoding = [text for text in batch if text.was_decoding]
        plan = self._plan(decoding)
        for text, in_flight in zip(decoding, plan.in_flight, strict=True):
            text.in_flight, text.chosen_at = in_flight, began_at
        others = [text for text in batch if not text.was_decoding]
        # Texts that are scored share the rows of a chunk, which leaves room for decoding texts.
        rows = min(self._max_rows // 4, self._verifier.pace.beside_others)
        rows //= max(sum(text.is_scored for text in others), 1)
        for text in others:
            text.in_flight = InFlight(text.forced_tree(rows))
        if not self._submit(batch) or not self._verifier.has_pending:
            return
        try:
            stepped = self._verifier.step()
        except Exception as error:
            log.exception("engine step failed")
            self._faults.contain(error)
            return
        self._faults.went_well()
        report = replace(stepped.report, period_s=period_s, draft_time_s=self._drafted.time_s)
        answered = self._commit(stepped, report, plan.why)
        posted_at = self._clock()
        self._note_round(decoding, plan, answered, report, posted_at - began_at)
        self._draft(plan.ask, answered, report)
        drafted_at = self._clock()
        # Only now, because residents read the rows of the step in the pages of these texts too.
        for text in answered:
            if text.end is not None:
                self._keeper.drop(text)
        with self._scoring:
            self._controller.score([text for text in answered if text.end is None])
        self._settled_s = self._clock() - drafted_at

    def _batch(self) -> list[TargetText]:
        """Return the texts that join the step: all that are ready, or one suspect alone."""
        ready = [text for text in self._texts.values() if _is_ready(text)]
        suspects = [text for text in ready if text.suspect]
        in_flight = [text for text in self._texts.values() if text.in_flight is not None]
        if suspects or any(text.suspect for text in in_flight):
            return [] if in_flight else suspects[:1]
        if len(ready) <= self._max_rows:
            return ready
        # If not all fit, the group of the text that has waited longest goes first.
        first = min(ready, key=lambda text: text.answered_at).group
        ready.sort(key=lambda text: (text.group != first, text.answered_at))
        return ready[: self._max_rows]

    def _plan(self, decoding: Sequence[TargetText]) -> Plan:
        if not decoding:
            return Plan([])
        room = max(self._max_rows - len(decoding), 0)
        # A path of k accepted nodes emits k + 1 tokens.
        max_depths = [text.remaining - 1 for text in decoding]
        lacking = sum(
            len(text.tokens) - text.record.held_len
            for text in self._texts.values()
            if text.in_flight is not None or _is_ready(text)
        )
        prompt_rows = min(lacking - len(decoding), room)
        now = self._clock()
        moment = Moment(now, self._residents.usable(now), max(prompt_rows, 0))
        with self._planning:
            plan = self._controller.plan(decoding, max_depths, room, moment)
            for text, in_flight in zip(decoding, plan.in_flight, strict=True):
                if not text.is_coupled:
                    text.record.laws = laws_of_verified(text, in_flight.tree)
            return plan
        # It is not known on which tree it failed, so all are dropped, and this step is a plain one.
        for text in decoding:
            text.held.clear()
            text.ask = NO_DRAFTS
        return Plan([PLAIN] * len(decoding), why=PlainWhy.FAULT)

    def _submit(self, batch: Sequence[TargetText]) -> bool:
        """Hand the batch to the engine; returns False if that failed."""
        try:
            refused = self._verifier.submit(
                [(text.record, text.in_flight.tree) for text in batch if text.in_flight]
            )
        except Exception as error:
            log.exception("texts were not taken count=%d", len(batch))
            self._faults.contain(error)
            return False
        self._keeper.take_refusals(refused)
        return True

    def _commit(self, stepped: Stepped, report: StepReport, why: PlainWhy) -> list[TargetText]:
        """Commit and send the answers of the step.  Returns the texts with a verdict."""
        answered: list[TargetText] = []
        self._streams.note_step(report)
        plain_why = PlainWhy.NONE
        frames: dict[TargetStream, list[TextVerdict]] = {stream: [] for stream in self._streams}
        for verdict in stepped.verdicts:
            text = self._texts[verdict.request_id]
            in_flight, said = text.in_flight, text.take(verdict, why)
            if text.opened.return_draft_trees:
                said = with_step(said, text.names, in_flight or PLAIN, verdict.path, report)
            frames.setdefault(text.stream, []).append(said)
            if said.why:
                plain_why = said.why
                self.recorder.add(metrics.PLAIN_STEPS, why=said.why.name.lower())
            text.answered_at = self._began_at
            answered.append(text)
        report = replace(report, why=plain_why)
        for stream, verdicts in frames.items():
            if verdicts or stream.gets_reports:
                told = report if stream.counts else None
                stream.post(VerdictFrame(tuple(verdicts), report=told))
        self._keeper.take_misses(stepped.missed)
        self._keeper.take_refusals(stepped.refused)
        return answered

    def _draft(self, ask: Ask, answered: Sequence[TargetText], report: StepReport) -> None:
        """Let the residents draft for the step that follows."""
        texts = []
        now = self._clock()
        moment = Moment(now, self._residents.usable(now))
        for text in answered:
            if text.end is not None or not text.record.residents:
                continue
            if text.chosen_at != self._began_at:  # its prompt has been read
                text.ask = NO_DRAFTS
                with self._planning:
                    self._controller.first_ask(text, moment)
            nodes = 0 if text.is_scored else min(text.ask.num_nodes, text.cap)
            text.record.draft_nodes, text.record.ask_mask = nodes, text.ask_mask
            texts.append(text)
        self._asked = ask
        self._drafted = self._residents.draft(
            [text.record for text in texts], report, self._verifier.last_rows
        )
        by_id = {text.id: text for text in texts}
        for drafter, proposal in self._drafted.trees:
            text = by_id[proposal.request_id]
            held = self._controller.scores.keep_newest(text, drafter.name, proposal)
            if held is not None:
                held.is_resident, held.is_look_up = True, drafter.is_look_up
                held.laws = proposal.laws if drafter.is_believed else NO_LAWS

    def _note_round(
        self,
        decoding: Sequence[TargetText],
        plan: Plan,
        answered: Sequence[TargetText],
        report: StepReport,
        step_s: float,
    ) -> None:
        """Learn from the step; step_s: its whole time, from the choice to the verdicts."""
        asked, drafted = self._asked, self._drafted
        texts = [text for text in answered if text.chosen_at == self._began_at]
        if not texts:
            return
        is_whole = len(texts) == len(answered) == len(decoding)
        # Drafting times are no use if a drafter has stalled, and of little use beside prompts.
        is_timed = not drafted.stalled and (is_whole or report.num_prefill_tokens > 0)
        done = Round(
            texts,
            [text.num_gained for text in texts],
            num_nodes=sum(len(in_flight.tree) for in_flight in plan.in_flight),
            is_sampled=any_sampled(texts),
            step_time_s=step_s + self._settled_s if is_timed else None,
            draft_time_s=drafted.time_s if asked.num_nodes else 0.0,
            turns=drafted.turns if is_timed else (),
            prompt_rows=report.num_prefill_tokens,
        )
        with self._learning:
            self._controller.learn(done)

    def exchange(self, drafters: Sequence[ResidentDrafter]) -> list[ResidentDrafter]:
        """Draft with these from now on, and return those of their names; to be called between two
        steps.  Every text is told to them as to drafters that know nothing of it."""
        former = [self._residents.exchange(drafter) for drafter in drafters]
        for drafter in drafters:
            self._controller.scores.meet(drafter.name, drafter.model.model_hash)
            for text in self._texts.values():
                text.forget(drafter.name)
        return former

    # Reports

    def report(self) -> tuple[StepReport, dict[str, Any]]:
        """Bring the target's own metrics up to date; returns its pages and a snapshot of its
        state."""
        recorder, state = self.recorder, dict[str, Any]()
        with self._scoring:
            self._controller.scores.roster.note_faults(self._residents.faults())
            self._controller.scores.record(recorder)
            recorder.set(metrics.DEFICIT, self._controller.deficit_s, target=self._worker_id)
            recorder.set(metrics.SPEEDUP, self._controller.speedup, target=self._worker_id)
            state["scores"] = self._controller.acceptance.table()
            state["loads"] = self._controller.states()
            state["rollouts"] = self._controller.scores.roster.table()
        state["residents"] = self._residents.states()
        state["written_at"] = {each.name: each.model.written_at for each in self._residents}
        state["faults"] = self._residents.faults()
        self._residents.record(recorder, self._worker_id)
        in_use, total = self._streams.pages = self._verifier.pages
        return StepReport(pages_in_use=in_use, pages_total=total), state

    def export_learned(self) -> Mapping[str, Any]:
        """Return what the control loop has learned as plain values."""
        return self._controller.export()


def _is_ready(text: TargetText) -> bool:
    return text.in_flight is None and not text.stream.is_parked
