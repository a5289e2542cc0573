"""The control loop: which drafts each step verifies, what residents draft, what is waited for.

    plan()   before a step: the trees at hand, priced; nodes per text, nodes to draft, or a wait
    ask()    what a pool drafter is asked for with a commit
    learn()  after a round: what it took and what it brought

Three things can turn drafting off: the throttle (it does not pay), the guard (it has lost what it
may lose), and a drafter's circuit breaker (it fails).  Everything else is the budget's choice, by
one price: see `cluster.spec.budget`.  No clock, no randomness, no I/O; `now` is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cluster import metrics
from cluster.config import CoordinatorConfig
from cluster.coordinator import step_choice
from cluster.coordinator.in_flight import Moment, Plan, Round
from cluster.coordinator.load import Load, TargetModel
from cluster.coordinator.offers import Offers, gather, in_flight_of, look_at, plain_items
from cluster.coordinator.step_choice import StepChoice
from cluster.coordinator.texts import Answer, Text
from cluster.core import Proposal
from cluster.messages import DraftTime
from cluster.metrics import Recorder
from cluster.spec import evidence, merge_trees
from cluster.spec.acceptance import AcceptanceModel, Group, Seen, law_name
from cluster.spec.budget import NO_DRAFTS, Ask
from cluster.spec.forest import depths, ranked
from cluster.spec.step_profile import StepProfile
from cluster.spec.throttle import State
from cluster.spec.waiting import WAITS_S, ArrivalTable

# Trees scored per round, and commits that left a pool drafter nothing: evidence, not all there is.
_MAX_SEEN = 16
# A drafter that sends more trees within the waits is one whose first ones tell enough.
_MAX_TREES = 64
# Nodes that a pool drafter is asked for, of one text and of all texts of a target: broader trees
# more often go on behind the next commit; but the coordinator reads all of it.
_POOL_NODES = 64
_POOL_NODES_OF_ALL = 512
_MAX_LAG = 64  # tokens that a pool drafter may lack: they are read in one commit later
_STATE_VERSION = 3  # of what `export` gives


class Controller:
    """Plans rounds and learns from them, for all targets of one coordinator."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self._targets: dict[str, TargetModel] = {}
        self._arrivals: dict[tuple[str, bool], ArrivalTable] = {}
        self._answers: list[tuple[str, Text, Answer, float]] = []
        self._costs: Sequence[Any] | None = None  # of former targets of this kind
        self._num_looks = 0
        self._num_looked: Counter[tuple[str, str, bool]] = Counter()  # drafter, task, a miss
        self._exported: set[tuple[str, Group]] = set()  # scores with gauges
        self.acceptance = AcceptanceModel()
        self.max_wait_s = config.max_draft_wait_ms / 1000.0 if config.budget == "adaptive" else 0.0
        merge_trees.prepare()

    def meet(
        self, target_id: str, profile: StepProfile | None, draft_times: Sequence[DraftTime] = ()
    ) -> None:
        """A target has joined, with what it has measured of its steps and of its residents."""
        target = self._targets[target_id] = TargetModel(target_id, profile, draft_times)
        if self._costs is not None:
            target.restore(self._costs)

    def forget(self, target_id: str) -> None:
        self._targets.pop(target_id, None)

    def state(self, target_id: str, num_sequences: int, now: float, *, is_sampled: bool) -> State:
        """Whether batches of that law and size are speculated on at present."""
        return self._load(target_id, num_sequences, is_sampled=is_sampled).throttle.state(now)

    def states(self, now: float) -> list[dict[str, object]]:
        """The state of every throttle, for status reports."""
        return [state for target in self._targets.values() for state in target.states(now)]

    def take_account(self, target_id: str) -> tuple[float, int]:
        """(deficit in seconds, refusals of the guard since this was last asked) of a target."""
        return self._target(target_id).take_account()

    def plan(
        self,
        target_id: str,
        texts: Sequence[Text],
        max_depths: Sequence[int],
        max_nodes: int | None,
        moment: Moment,
    ) -> Plan:
        """The next step of `texts`, or a wait before it.

        max_depths: of each text's nodes; deeper ones could never be emitted.
        max_nodes: over the whole batch, None = as many as one likes.
        """
        caps = [min(text.max_draft_tokens, depth * 64) for text, depth in
                zip(texts, max_depths, strict=True)]  # fmt: skip
        if max_nodes is not None and sum(caps) > max_nodes:
            caps = [min(cap, max_nodes // len(texts)) for cap in caps]
        if self._config.budget == "fixed":
            return self._plan_fixed(texts, max_depths, caps, moment)
        load = self._load(target_id, len(texts), is_sampled=any_sampled(texts))
        load.num_rounds += 1
        num_new = sum(text.num_steps <= 1 for text in texts)  # the prompt's own step was one
        load.num_new += evidence.RECENT * (num_new - load.num_new)
        state = load.throttle.state(moment.now)
        if state is State.PAUSE or not any(caps):
            load.asked = NO_DRAFTS
            return Plan(plain_items(texts), why=state.value)
        choice = StepChoice.of(self._target(target_id), load, texts, caps, moment)
        if choice is None:
            return Plan(plain_items(texts), why="unmeasured")  # the first steps tell what one takes
        is_looking = state is not State.PLAIN or load.num_rounds % step_choice.LOOK_INTERVAL == 0
        is_looking = is_looking or load.asked.num_nodes > 0
        offers = self._offers(texts, max_depths) if is_looking else None
        plan = choice.plan(offers, self.acceptance, self._arrivals)
        if plan.wait_s == 0.0:
            if is_looking:
                self._look_at(texts)
            load.asked = plan.ask
            plan.note_asked(texts)
        return plan

    def _plan_fixed(
        self, texts: Sequence[Text], max_depths: Sequence[int], caps: list[int], moment: Moment
    ) -> Plan:
        offers = self._offers(texts, max_depths)
        self._look_at(texts)
        drafted = Ask(max(caps)) if moment.residents else NO_DRAFTS
        if offers is None:
            return Plan(plain_items(texts), drafted, why="no drafts")
        forest = offers.forest
        nodes, ranks = ranked(offers.survival, forest.owners, forest.starts)
        chosen = nodes[ranks < np.array(caps, dtype=np.int64)[forest.owners]]
        return Plan(in_flight_of(texts, offers, chosen), drafted, why="fixed")

    def _look_at(self, texts: Sequence[Text]) -> None:
        self._num_looks += 1
        look_at(texts, _MAX_SEEN, self._num_looks)

    def _offers(self, texts: Sequence[Text], max_depths: Sequence[int]) -> Offers | None:
        offers = gather(texts, self.acceptance)
        for text in texts:
            for name, answer in text.answers.items():
                held = text.held.get(name)
                # A tree that came since the commit tells nothing of the former one.
                if answer.is_missed is None and not answer.trees:
                    answer.is_missed = held is None or held.num_nodes == 0
        if offers is None or min(max_depths) >= int(np.diff(offers.forest.starts).max()):
            return offers
        limits = np.array(max_depths)[offers.forest.owners]
        is_within = depths(offers.forest.parents) <= limits
        return offers if is_within.all() else offers.keep(is_within)

    def first_ask(self, target_id: str, num_sequences: int, text: Text, now: float) -> Ask:
        """What residents draft for a text whose prompt is read: as for those that run."""
        if self._config.budget == "fixed":
            return Ask(text.max_draft_tokens)
        load = self._load(target_id, num_sequences, is_sampled=text.is_sampled)
        is_overdrawn = load.guard.max_extra_s(1.0) <= 0.0
        if is_overdrawn or load.throttle.state(now) in (State.PLAIN, State.PAUSE):
            return NO_DRAFTS
        ask, target = load.best, self._target(target_id)
        if load.num_rounds == 0:  # nobody knows: of models one text now and then
            ask = Ask(step_choice.FIRST_NODES, target.first.is_due(now, target.read_s))
        if ask.num_nodes and ask.with_models:
            target.first.take(now)
            text.asked_len = len(text.tokens)
        return ask

    # What pool drafters are told and say

    def ask(self, text: Text, num_sequences: int, *, is_model: bool) -> int:
        """How many nodes a pool drafter may grow behind the next commit; it always may some.

        is_model: it keeps what it has grown; look-ups would build a broad tree anew each time.
        """
        most = _POOL_NODES if text.max_draft_tokens else 0
        if is_model or self._config.budget == "fixed":
            return most  # beyond what a step takes, for the rest survives the re-rooting
        return min(max(_POOL_NODES_OF_ALL // max(num_sequences, 1), 1), most)

    def commit_lag(self, text: Text, drafter: str, num_sequences: int, *, is_shared: bool) -> int:
        """Tokens of `text` that may be kept back from a pool drafter, and one: 1 = none.

        Reading its trees costs time, in a crowd above all.  is_shared: it drafts on target's cores.
        """
        num_unused, most = text.num_unused(drafter), step_choice.LOOK_INTERVAL
        if self._config.budget == "fixed" or num_unused < most:
            return 1
        # On the target's cores a commit costs as much as some tokens: fewer and fewer are sent.
        return min(num_unused, _MAX_LAG) if is_shared else min(max(num_sequences // 2, 1), most)

    def committed(self, text: Text, drafter: str, now: float) -> None:
        """A pool drafter is about to be told of new tokens of `text`."""
        if self.max_wait_s == 0.0:
            return
        former = text.answers.get(drafter)
        if former is not None and former.context_len == len(text.tokens):
            return
        if former is not None and former.is_missed is not None:
            self._num_looked[drafter, text.group[0], former.is_missed] += 1
        if former is not None and former.is_missed and len(self._answers) < _MAX_SEEN:
            self._answers.append((drafter, text, former, now - former.committed_at))
            if former.trees:
                _, tree, claimed = former.trees[-1]
                seen = Seen.of(drafter, text.group, former.context_len, tree, claimed)
                text.seen.append(seen)
        text.answers[drafter] = Answer(now, len(text.tokens))

    def arrived(self, text: Text, drafter: str, proposal: Proposal, now: float) -> bool:
        """Note a pool drafter's tree; True when it is for what is committed at present."""
        answer = text.answers.get(drafter)
        if answer is None or proposal.base_len != answer.context_len or not len(proposal.tree):
            return False
        answer.is_complete = proposal.is_complete
        age_s = now - answer.committed_at
        if age_s <= WAITS_S[-1] and len(answer.trees) < _MAX_TREES:
            answer.trees.append((age_s, proposal.tree, proposal.survival))
        return True

    def completed(self, text: Text, drafter: str) -> None:
        """A pool drafter has nothing to add for what is committed at present."""
        answer = text.answers.get(drafter)
        if answer is not None:
            answer.is_complete = True

    def learn(self, target_id: str, done: Round, now: float) -> None:
        """Enter a finished round into costs, rate, guard and throttle."""
        size = len(done.texts)
        if size == 0:
            return
        target = self._target(target_id)
        load = self._load(target_id, size, is_sampled=done.is_sampled)
        plain_s = target.steps.estimate(size, 0)
        step_s = done.step_time_s
        if step_s is None:
            step_s = target.steps.estimate(size, done.num_nodes)
        if plain_s is not None and step_s is not None:
            is_plain = not (done.num_nodes or done.draft_time_s or done.waited_s)
            time_s = step_s + done.draft_time_s + done.waited_s
            # A plain round is its own plain equivalent, slow or not.
            credited_s = (plain_s if done.num_nodes else step_s) * sum(done.num_tokens) / size
            load.guard.settle(time_s, credited_s, plain_s, is_plain=is_plain)
            if done.num_nodes:
                promised, trust = load.promised
                trust.learn(promised, sum(done.num_tokens) - size)
            if not is_plain:
                load.throttle.settle(now, time_s, credited_s)
            weighted = sum(
                text.weight / text.tokens_per_step * num_tokens
                for text, num_tokens in zip(done.texts, done.num_tokens, strict=True)
            )
            load.add(weighted, time_s)
        for text, num_tokens in zip(done.texts, done.num_tokens, strict=True):
            text.emitted(num_tokens)
        if done.num_nodes or not (done.asked.num_nodes or done.draft_time_s):
            # Beside drafts that nobody verifies a step takes longer than a plain one.
            target.measured(size, done.num_nodes, done.step_time_s or 0.0)
        target.measured_drafting(size, done.asked, done.draft_time_s, done.num_read)

    def score(self, texts: Sequence[Text], *, ends: bool = False) -> None:
        """Score the trees of `texts` whose fate is known by now; ends: nothing more follows."""
        for text in texts:
            for seen, followed in text.due(ends=ends):
                self.acceptance.learn(seen, followed, text.next_steps(seen.drafter))
        answers, self._answers = self._answers, []
        for drafter, text, answer, elapsed_s in answers:
            calibrator = self.acceptance.known(drafter, text.group).calibrator
            trees = [
                (age_s, calibrator.survival(tree.parents, claimed))
                for age_s, tree, claimed in answer.newest_per_wait()
            ]
            table = self._arrivals.setdefault((drafter, text.is_sampled), ArrivalTable())
            is_answered = answer.is_complete or bool(answer.trees)
            table.observe(trees, elapsed_s, is_answered=is_answered)

    def record(self, recorder: Recorder) -> None:
        """Export what drafts are worth; not on the way of a round."""
        for (drafter, task, is_missed), count in self._num_looked.items():
            outcome = "miss" if is_missed else "hit"
            recorder.add(metrics.PRE_DRAFTED, count, drafter=drafter, task=task, outcome=outcome)
        self._num_looked.clear()
        scored = {(drafter, group): score for drafter, group, score in self.acceptance}
        for drafter, group in self._exported - scored.keys():
            for gauge in (metrics.CALIBRATION_ERROR, metrics.EXPECTED_ACCEPTED):
                recorder.forget(gauge, **_labels(drafter, group))
        self._exported &= scored.keys()
        for (drafter, group), score in scored.items():
            if score.num_trees:
                self._exported.add((drafter, group))
                labels = _labels(drafter, group)
                error = score.calibrator.expected_error()
                recorder.set(metrics.CALIBRATION_ERROR, error, **labels)
                recorder.set(metrics.EXPECTED_ACCEPTED, score.accepted_of_few(), **labels)

    def export(self) -> dict[str, Any]:
        """What was learned, as one small record of plain values, to be kept beside the model."""
        targets = self._targets.values()
        best = max(targets, key=lambda target: target.steps.num_recorded, default=None)
        costs = None if best is None else best.export()
        return {"version": _STATE_VERSION, "scores": self.acceptance.export(), "costs": costs}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `export` gave, of the same model on the same hardware.

        Raises ValueError for a record of another version or form.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(f"a record of version {state.get('version')}, not {_STATE_VERSION}")
        self.acceptance.restore(state["scores"])
        self._costs = state["costs"]

    def _target(self, target_id: str) -> TargetModel:
        target = self._targets.get(target_id)
        if target is None:
            target = self._targets[target_id] = TargetModel(target_id, None)
        return target

    def _load(self, target_id: str, num_sequences: int, *, is_sampled: bool) -> Load:
        target = self._target(target_id)
        return target.load(self._config, num_sequences, is_sampled=is_sampled)


def _labels(drafter: str, group: Group) -> dict[str, str]:
    task, is_sampled = group
    return {"drafter": drafter, "task": task, "law": law_name(is_sampled=is_sampled)}


def any_sampled(batch: Sequence[Text]) -> bool:
    """The law of a batch, which is of one law where that can be."""
    return any(text.is_sampled for text in batch)
