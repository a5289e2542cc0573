"""The control loop of one target: which drafts each step verifies, and what residents draft after.

    plan()   before a step: the trees at hand, priced; nodes per text, and nodes to draft after it
    learn()  after a step: the time that it took and the tokens that it brought
    scores   beside a step: how many nodes of each held tree would have been accepted

One price decides about verifying and drafting (`cluster.spec.budget`), below the caps of each text.
Two more things turn drafting off: the guard, once speculation has lost as much as it may, and the
circuit breaker of a drafter that fails.  No clock, no randomness, no I/O; `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cluster.config.schema import CoordinatorConfig
from cluster.config.speculation import DraftLengthConfig, DraftLengthOverride
from cluster.plan.ensemble import Ensemble
from cluster.plan.in_flight import (
    Moment,
    Offers,
    Plan,
    Round,
    best_of,
    gather,
    look_at,
)
from cluster.plan.load import TargetModel
from cluster.plan.roster import DraftScores
from cluster.plan.step_choice import StepChoice
from cluster.plan.texts import Text
from cluster.requests.fields import PlainWhy
from cluster.spec import evidence
from cluster.spec.budget import FIRST_NODES, NO_DRAFTS, Ask
from cluster.spec.native import trees as native
from cluster.spec.step_profile import DraftTime, StepProfile
from cluster.spec.survival import claimed_conditionals
from cluster.spec.tree import depths, with_ancestors


class Controller:
    """Plans the steps of one target and learns from them.

    target: what it knows of it.  config: the settings that it plans by.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        profile: StepProfile | None = None,
        draft_times: Sequence[DraftTime] = (),
        scores: DraftScores | None = None,
    ) -> None:
        """profile, draft_times: its step times and drafting times, measured before it served.
        scores: of the drafters, if some are shadows or in a rollout."""
        self.config = config
        self.target = TargetModel(profile, draft_times)
        self._num_looks = 0
        self._num_sequences = 1  # of the last step
        self._idle: StepChoice | None = None  # whose plan has no drafts, and may hold longer
        self.scores = scores or DraftScores()
        self.acceptance = self.scores.acceptance
        native.is_available()  # compiles now what the first step would wait for

    def use(self, config: CoordinatorConfig) -> None:
        """Plan by other settings from the next step on; what was learned stays."""
        self.config, self._idle = config, None

    def plan(
        self,
        texts: Sequence[Text],
        max_depths: Sequence[int],
        max_nodes: int | None,
        moment: Moment,
    ) -> Plan:
        """Plan the next step of `texts`.

        max_depths: for each text, the depth beyond which a node could never be emitted.
        max_nodes: limit for the whole batch, None = no limit.
        """
        self._num_looks += 1
        self._num_sequences = len(texts)
        self._set_caps(texts)
        moment = moment.among(texts)
        plan = self._plan(texts, max_depths, max_nodes, moment)
        for text, team in zip(texts, plan.teams or [None] * len(texts), strict=True):
            text.take_ask(plan.ask, team, moment.residents)
        if self.config.draft_length.kind in _BOUNDS:
            for text, item in zip(texts, plan.in_flight, strict=True):
                text.verified_depth = int(depths(item.tree.parents).max(initial=0))
        return plan

    def _plan(
        self,
        texts: Sequence[Text],
        max_depths: Sequence[int],
        max_nodes: int | None,
        moment: Moment,
    ) -> Plan:
        caps = [min(text.cap, depth * 64) for text, depth in zip(texts, max_depths, strict=True)]
        if max_nodes is not None and sum(caps) > max_nodes:
            caps = [min(cap, max_nodes // len(texts)) for cap in caps]
        offers = self._offers(texts, max_depths)
        look_at(texts, self._num_looks)
        if self.config.budget == "fixed":
            return _plan_fixed(texts, offers, caps, moment)
        load = self.target.load(self.config, texts)
        num_new = sum(text.num_steps <= 1 for text in texts)  # the step of the prompt was the first
        load.num_new += evidence.RECENT * (num_new - load.num_new)
        if not any(caps):
            self._idle = None
            return Plan.plain(texts)
        if offers is None and not moment.residents:  # nothing to choose, and nobody to ask
            return Plan.plain(texts, PlainWhy.NO_DRAFTS)
        if offers is None and self._idle and self._idle.holds(texts, caps, moment):
            return Plan.plain(texts, self._idle.why)
        weights = np.array([self._weight(text) for text in texts])
        if self.target.steps.estimate(1, 0) is None:  # the first steps measure a step's time
            return Plan.plain(texts, PlainWhy.UNMEASURED)
        choice = StepChoice(self.target, self.acceptance, load, texts, caps, moment, weights)
        plan = choice.plan(offers)
        is_idle = offers is None and choice.needed_s and not moment.prompt_rows
        self._idle = choice if is_idle else None
        return plan

    def _offers(self, texts: Sequence[Text], max_depths: Sequence[int]) -> Offers | None:
        offers = gather(texts, self.acceptance)
        settings = self.config.draft_length
        if offers is not None and settings.kind == "threshold":
            parents = offers.forest.parents
            likely = claimed_conditionals(parents, offers.survival) >= settings.threshold
            offers = offers.keep(with_ancestors(parents, likely)) if likely.any() else None
        if offers is None or min(max_depths) >= int(np.diff(offers.forest.starts).max()):
            return offers
        limits = np.array(max_depths)[offers.forest.owners]
        is_within = depths(offers.forest.parents) <= limits
        return offers.keep(is_within)

    def first_ask(self, text: Text, moment: Moment) -> None:
        """Ask for a text whose prompt is read; it is the ask for running texts."""
        moment = moment.among([text])
        self._set_caps([text])
        if self.config.budget == "fixed" or not text.cap:
            text.take_ask(Ask(text.cap))
            return
        load = self.target.latest.get(text.is_sampled)
        # Where no best ask is known, look-ups draft, which need not read.
        rate, ask = 0.0, Ask(FIRST_NODES, with_models=False)
        if load is not None:
            if load.guard.max_extra_s(1.0) <= 0.0:
                text.take_ask(NO_DRAFTS)
                return
            rate, ask = load.rate(0.0), load.best or ask
        ensemble = Ensemble(self.target, self.acceptance, moment.residents, rate)
        (team,) = (
            ensemble.teams([text], np.array([self._weight(text)]))
            if ask.with_models
            else ensemble.look_ups([text])
        )
        text.take_ask(ask, team, moment.residents)

    def learn(self, done: Round) -> None:
        """Enter a finished step into the costs, the rate and the guard."""
        size = len(done.texts)
        if size == 0:
            return
        target = self.target
        load = target.load(self.config, done.texts)
        plain_s = target.steps.estimate(size, 0)
        step_s = done.step_time_s
        if done.prompt_rows and step_s is not None:
            target.steps.record_rows(size, done.num_nodes + done.prompt_rows, step_s)
        if step_s is None or done.prompt_rows:
            step_s = target.steps.estimate(size, done.num_nodes)
        time_s = (step_s or 0.0) + done.draft_time_s
        if plain_s is not None and step_s is not None:
            is_plain = not (done.num_nodes or done.draft_time_s)
            # The plain equivalent of a plain step is its own time, even if it was slow.
            credited_s = (plain_s if done.num_nodes else step_s) * sum(done.num_tokens) / size
            load.guard.settle(time_s, credited_s, plain_s, is_plain=is_plain)
            target.pace.add(credited_s, time_s)
            if done.num_nodes and size == self._num_sequences:  # else not all had their answers
                promised, arm = load.promised
                arm.kept.add(sum(done.num_tokens) - size, promised)
            weighted = sum(
                self._weight(text) * num_tokens
                for text, num_tokens in zip(done.texts, done.num_tokens, strict=True)
            )
            load.brought.add(weighted, time_s)
        for text, num_tokens in zip(done.texts, done.num_tokens, strict=True):
            text.emitted(num_tokens)
            if done.num_nodes:  # else what was chosen may not have been verified
                _follow(text, self.config.draft_length, num_tokens)
        if done.prompt_rows:
            return
        # Where residents draft, a step without nodes takes longer than a plain one: it is no
        # measurement.
        if done.step_time_s and (done.num_nodes or not done.draft_time_s):
            target.steps.record(size, done.num_nodes, done.step_time_s)
        for turn in done.turns:
            target.drafting[turn.drafter].learn(turn)

    def export(self) -> dict[str, Any]:
        """Return what was learned as a small record of plain values, to keep beside the model."""
        return {**self.scores.export(), "costs": self.target.export()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `export` for the same model on the same hardware.

        Raises ValueError, TypeError or LookupError for a record of another form.
        """
        self.scores.restore(state)
        self.target.restore(state["costs"])

    def _set_caps(self, texts: Sequence[Text]) -> None:
        for text in texts:
            text.cap = _cap(text, self.config.draft_length, self._num_sequences)

    def _weight(self, text: Text) -> float:
        """Return how much a token of it counts."""
        return self.config.latency_classes.get(text.latency_class, 1.0) / text.tokens_per_step


def _plan_fixed(
    texts: Sequence[Text], offers: Offers | None, caps: Sequence[int], moment: Moment
) -> Plan:
    """Plan as many of the best nodes as each text may have, whatever they cost."""
    drafted = Ask(max(caps)) if moment.residents else NO_DRAFTS
    if offers is None:
        return Plan.plain(texts, PlainWhy.NO_DRAFTS, drafted)
    return Plan(best_of(offers, caps), drafted)


# For each kind that follows a text, its bounds where the configuration names none; None = what the
# text may have.
_BOUNDS: dict[str, tuple[int, int | None]] = {"heuristic": (1, None), "window": (3, 12)}


def _cap(text: Text, settings: DraftLengthConfig, num_sequences: int) -> int:
    """Return how many nodes a step of so many texts may verify for one, by `draft_length` and the
    operator's rules.

    The planner chooses below these caps, and the guard stays under all.
    """
    if text.is_plain:
        return 0
    cap = text.max_draft_tokens
    if settings.kind == "constant":
        cap = min(cap, settings.num_tokens)
    elif settings.kind in _BOUNDS:
        text.draft_len = text.draft_len or next_len(settings, settings.num_tokens, (), cap)
        cap = min(cap, text.draft_len)
    task = text.group[0].partition("@")[0]  # without its adapter
    for rule in settings.overrides:
        if applies(rule, text.latency_class, task, num_sequences):
            return min(cap, rule.max_draft_tokens)
    return cap


def applies(rule: DraftLengthOverride, latency_class: str, task: str, num_sequences: int) -> bool:
    """True if a rule is for such a text in a step of so many."""
    return (
        num_sequences >= rule.load_from
        and rule.class_ in ("", latency_class)
        and rule.task in ("", task)
    )


def _follow(text: Text, settings: DraftLengthConfig, num_tokens: int) -> None:
    """Let a text's length follow the tree that was verified last, whose step brought num_tokens."""
    depth = text.verified_depth
    if depth and settings.kind in _BOUNDS:
        fates = (*text.fates, (min(num_tokens - 1, depth), depth))
        text.fates = fates[-settings.num_steps :]
        text.draft_len = next_len(settings, text.draft_len, text.fates, text.max_draft_tokens)


def next_len(
    settings: DraftLengthConfig, draft_len: int, fates: Sequence[tuple[int, int]], most: int
) -> int:
    """Return a text's draft length after a step with drafts, which was draft_len before.

    fates: of its latest steps with drafts, the newest last: accepted tokens, and the tree's depth;
    there are none before its first step.  most: what the text may have.
    """
    if fates and settings.kind == "heuristic":
        accepted, depth = fates[-1]
        draft_len += 2 if accepted == depth else -1
    elif fates:
        share = sum(accepted for accepted, _ in fates) / sum(depth for _, depth in fates)
        draft_len += (share > settings.raise_above) - (share < settings.lower_below)
    least, greatest = _BOUNDS[settings.kind]
    upper = min(settings.max_tokens or greatest or most, most)
    return min(max(draft_len, settings.min_tokens or least), upper)
