"""The target owns its steps: one engine thread, and any number of coordinators.

A step begins as soon as a text is ready; what is not there yet joins a later one.  Nothing here
waits for a coordinator or a drafter of the pool.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster import metrics
from cluster.core import Clock
from cluster.plan.fence import Fence
from cluster.plan.in_flight import PLAIN, Moment, Plan, Round, laws_of_verified
from cluster.requests.fields import NO_LAWS, PlainWhy
from cluster.rpc.messages import StepReport, TextVerdict, VerdictFrame
from cluster.spec.budget import NO_DRAFTS, Ask
from cluster.worker.mailbox import TargetStream
from cluster.worker.residents import NOTHING_DRAFTED, Drafted, ResidentDrafter
from cluster.worker.text_keeper import TextKeeper
from cluster.worker.texts import TargetText
from cluster.worker.verifier import StepAnswers

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Step:
    """One step, with what came between the last one and it.

    former_at: when the last one began; 0 = this one does not follow at once.  asked, drafted: the
    drafts since then, and the ask that led to them.  settled_s: the time of all other work since
    then.  began_at: when it began itself.  decoding: the texts that `plan` is for.  ahead: those
    whose next step may begin before this one's tokens are known.
    """

    former_at: float = 0.0
    asked: Ask = NO_DRAFTS
    drafted: Drafted = NOTHING_DRAFTED
    settled_s: float = 0.0
    began_at: float = 0.0
    decoding: Sequence[TargetText] = ()
    ahead: Sequence[TargetText] = ()
    plan: Plan = field(default_factory=lambda: Plan([]))

    def round(self, answered: Sequence[TargetText], report: StepReport, step_s: float) -> Round:
        """Return what there is to learn; step_s: its time, from the choice to the verdicts."""
        drafted, num_read = self.drafted, report.num_prefill_tokens
        texts = [text for text in answered if text.chosen_at == self.began_at]
        is_whole = len(texts) == len(answered) == len(self.decoding)
        # Drafting times are no use if a drafter has stalled, and of little use beside prompts.
        is_timed = not drafted.stalled and (is_whole or num_read > 0)
        return Round(
            texts,
            [text.num_gained for text in texts],
            num_nodes=report.num_nodes,
            step_time_s=step_s + self.settled_s if is_timed else None,
            draft_time_s=drafted.time_s if self.asked.num_nodes else 0.0,
            turns=drafted.turns if is_timed else (),
            prompt_rows=num_read,
        )


class StepLoop:
    """The target without its network side.  The engine thread calls `run`, which calls the rest."""

    def __init__(self, texts: TextKeeper, clock: Clock = time.perf_counter) -> None:
        self.texts, self._clock = texts, clock
        self._verifier, self._residents = texts.verifier, texts.residents
        self._controller, self.recorder = texts.controller, texts.recorder
        self._worker_id = texts.description.worker_id
        self._max_rows = texts.description.max_batch_tokens
        for drafter in self._residents:
            self._controller.scores.meet(drafter.name, drafter.model.model_hash)
        self._planning, self._learning = (
            Fence(self.recorder, part) for part in ("planning", "rounds")
        )
        self._coming = Step()

    def run(self) -> None:
        """Serve until the mailbox is closed."""
        try:
            while self.texts.mailbox.take(is_busy=self.has_work):  # opens, cancels, pool trees
                self.turn()
        except BaseException as error:
            log.critical("engine thread ended", exc_info=True)
            self.texts.break_off(f"the target's engine thread ended: {type(error).__name__}")
            raise
        finally:
            self.texts.mailbox.close()  # so that nobody waits for a thread that has ended

    def turn(self) -> None:
        """Let others draft if the roster has changed, and make a step if there is work."""
        self._controller.scores.roster.follow(self.texts.values())
        if self.has_work:
            self._step(self._coming)
        else:
            self._coming.former_at = 0.0

    @property
    def has_work(self) -> bool:
        """True if a text may join a step or the engine has unfinished work."""
        if self.texts.broken is not None:
            return False
        return self._verifier.has_pending or bool(self.texts.next_batch(self._max_rows))

    # A step

    def _step(self, step: Step) -> None:
        stepped = self._verify(step, self._choose(step))
        if stepped is None:
            step.former_at = step.began_at
            return
        period_s = step.began_at - step.former_at if step.former_at else 0.0
        report = replace(stepped.report, period_s=period_s, draft_time_s=step.drafted.time_s)
        answered = self._commit(step, stepped, report)  # the verdicts leave first
        with self._learning:
            self._controller.learn(step.round(answered, report, self._clock() - step.began_at))
        drafted = self._draft(step, answered, report)  # by turns with the forward
        drafted_at = self._clock()
        # Only now, because residents read the rows of the step in the pages of these texts too.
        for text in answered:
            if text.end is not None:
                self.texts.drop(text)
        with self.texts.scoring:
            self._controller.scores.score([text for text in answered if text.end is None])
        settled_s = self._clock() - drafted_at
        self._coming = Step(step.began_at, step.plan.ask, drafted, settled_s)

    def _choose(self, step: Step) -> list[TargetText]:
        """Choose the texts of a step, and the nodes to verify; returns the texts to submit."""
        step.began_at = self._clock()
        # A step that runs already has its texts alone: the others wait for the one behind it.
        begun = self._verifier.ahead
        for text in begun:
            text.in_flight = PLAIN
        ready = self.texts.next_batch(self._max_rows)
        batch = begun or ready
        step.decoding = [text for text in batch if text.is_decoding]
        others = [text for text in batch if not text.is_decoding]
        step.plan = self._plan(step.decoding)
        step.ahead = [text for text in batch if text.remaining > 1 and not text.stream.is_parked]
        # A suspect waits too, until nothing is in flight.
        has_waiting = begun and any(text.is_ready for text in self.texts.values())
        if others or has_waiting or not step.plan.is_plain:
            step.ahead = ()
        if begun:
            step.plan = replace(step.plan, in_flight=[PLAIN] * len(begun))
        for text, in_flight in zip(step.decoding, step.plan.in_flight, strict=True):
            text.in_flight, text.chosen_at = in_flight, step.began_at
        # Texts that are scored share the rows of a chunk, which leaves room for decoding texts.
        rows = min(self._max_rows // 4, self._verifier.pace.beside_others)
        rows //= max(sum(text.is_scored for text in others), 1)
        for text in others:
            text.in_flight, text.chosen_at = replace(PLAIN, tree=text.forced_tree(rows)), None
        return [] if begun else ready

    def _plan(self, decoding: Sequence[TargetText]) -> Plan:
        if not decoding:
            return Plan([])
        room = self._max_rows - len(decoding)
        # A path of k accepted nodes emits k + 1 tokens.
        max_depths = [text.remaining - 1 for text in decoding]
        lacking = sum(
            len(text.tokens) - text.held_len
            for text in self.texts.values()
            if text.in_flight is not None or text.is_ready
        )
        prompt_rows = min(lacking - len(decoding), room, self._verifier.pace.beside_others)
        now = self._clock()
        moment = Moment(now, self._residents.usable(now), prompt_rows)
        with self._planning:
            plan = self._controller.plan(decoding, max_depths, room, moment)
            for text, in_flight in zip(decoding, plan.in_flight, strict=True):
                if not text.is_coupled:
                    text.laws = laws_of_verified(text, in_flight.tree)
            return plan
        # It is not known on which tree it failed, so all are dropped, and this step is a plain one.
        for text in decoding:
            text.held.clear()
            text.ask = NO_DRAFTS
        return Plan.plain(decoding, PlainWhy.FAULT)

    def _verify(self, step: Step, batch: Sequence[TargetText]) -> StepAnswers | None:
        """Make the engine's step; returns None if there is none, or it failed and is contained."""
        verifier = self._verifier
        try:
            refused = verifier.submit(
                [(text, text.in_flight.tree) for text in batch if text.in_flight]
            )
            self.texts.take_refusals(refused)
            if not verifier.has_pending:
                return None
            stepped = verifier.step(step.ahead)
        except Exception as error:
            log.exception("engine step failed count=%d", len(batch))
            self.texts.contain(error)
            return None
        self.texts.raised_alone.clear()  # names since the last good step
        return stepped

    def _commit(self, step: Step, stepped: StepAnswers, report: StepReport) -> list[TargetText]:
        """Commit and send the answers of the step.  Returns the texts with a verdict."""
        self.texts.streams.note_step(report)
        answered = [self.texts[verdict.request_id] for verdict in stepped.verdicts]
        told: defaultdict[TargetStream, list[TextVerdict]] = defaultdict(list)
        plain_why = PlainWhy.NONE
        for text, verdict in zip(answered, stepped.verdicts, strict=True):
            said = text.take(verdict, step.plan.why, report)
            told[text.stream].append(said)
            if said.why:
                plain_why = said.why
                self.recorder.add(metrics.PLAIN_STEPS, why=said.why.name.lower())
            text.answered_at = step.began_at
        report = replace(report, why=plain_why)
        for stream in self.texts.streams:
            own = tuple(told[stream])
            if own or stream.gets_reports:
                stream.post(VerdictFrame(own, report=report if stream.counts else None))
        if stepped.missed:
            self.recorder.add(metrics.CACHE_MISSES, len(stepped.missed))
        self.texts.take_refusals(stepped.refused)
        return answered

    def _draft(self, step: Step, answered: Sequence[TargetText], report: StepReport) -> Drafted:
        """Let the residents draft for the step that follows."""
        now, residents = self._clock(), self._residents
        moment = Moment(now, residents.usable(now))
        texts = [
            text
            for text in answered
            if text.end is None and any(map(text.may_ask, residents.names))
        ]
        for text in texts:
            if text.chosen_at != step.began_at:  # its prompt has been read
                text.ask = NO_DRAFTS
                with self._planning:
                    self._controller.first_ask(text, moment)
        drafted = residents.draft(texts, report, self._verifier.last_rows)
        for drafter, proposal in drafted.trees:
            text = self.texts[proposal.request_id]
            held = self._controller.scores.keep_newest(text, drafter.name, proposal)
            if held is not None:
                held.is_resident, held.is_look_up = True, drafter.member.is_look_up
                held.laws = proposal.laws if drafter.is_believed else NO_LAWS
        return drafted

    def exchange(self, drafters: Sequence[ResidentDrafter]) -> list[ResidentDrafter]:
        """Draft with these from now on, and return those of their names; to be called between two
        steps.  Every text is told to them as to drafters that know nothing of it."""
        former = [self._residents.exchange(drafter) for drafter in drafters]
        for drafter in drafters:
            self._controller.scores.meet(drafter.name, drafter.model.model_hash)
            for text in self.texts.values():
                text.forget(drafter.name)
        return former

    # Reports

    def report(self) -> tuple[StepReport, dict[str, Any]]:
        """Bring the target's own metrics up to date; returns its pages and a snapshot of its
        state."""
        recorder, residents, scores = self.recorder, self._residents, self._controller.scores
        target, now = self._controller.target, self._clock()
        faults = {each.name: dict(each.breaker.faults) for each in residents if each.breaker.faults}
        state: dict[str, Any] = {
            "residents": {each.name: each.breaker.state(now) for each in residents},
            "written_at": {each.name: each.model.written_at for each in residents},
            "faults": faults,
        }
        with self.texts.scoring:
            scores.roster.note_faults(faults)
            scores.record(recorder)
            recorder.set(metrics.DEFICIT, target.deficit_s, target=self._worker_id)
            recorder.set(metrics.SPEEDUP, target.pace.ratio(1.0), target=self._worker_id)
            state["scores"] = scores.acceptance.table()
            state["loads"] = target.states()
            state["rollouts"] = scores.roster.table()
        for each in residents:
            each.record(recorder, self._worker_id)
        in_use, total = self.texts.streams.pages = self._verifier.pages
        return StepReport(pages_in_use=in_use, pages_total=total), state
