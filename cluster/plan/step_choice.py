"""Chooses, at present prices, the nodes that a step verifies and the drafts to make after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cluster.plan.ensemble import Ensemble
from cluster.plan.in_flight import Moment, Offers, Plan, in_flight_of
from cluster.plan.load import BatchGroup, TargetModel
from cluster.plan.texts import Team, Text
from cluster.requests.fields import PlainWhy
from cluster.spec import evidence
from cluster.spec.acceptance import AcceptanceModel
from cluster.spec.budget import FIRST_NODES, NO_DRAFTS, SIZES, Ask, Prices, choose_nodes, ranking
from cluster.spec.step_profile import EDGES
from cluster.spec.tree import Floats, Indices, ranked

# The gain over plain decoding that speculation must promise, as a share of a step: a smaller one
# is within the error of the tables.
_MARGIN = 0.01


class StepChoice:
    """A batch that is being planned.

    caps: the most nodes of each text.  weights: the weight of each text's tokens.  plain_s: the
    seconds of a plain step.  teams: the residents of each text, look-ups alone and look-ups with
    models.  asked: the drafts that residents were asked for after the last step; arm: whose trees
    these are.  draft_s: their seconds for trees of each of SIZES; None = not known yet.  needed_s:
    drafts are asked for again once the guard allows a round so much extra time; inf = none pay,
    0 = at once.  why: nothing was verified.
    """

    def __init__(
        self,
        target: TargetModel,
        acceptance: AcceptanceModel,
        load: BatchGroup,
        texts: Sequence[Text],
        caps: Sequence[int],
        moment: Moment,
        weights: Floats,
    ) -> None:
        """target: its step times are known."""
        self.target, self.load, self.texts, self.moment = target, load, texts, moment
        self.caps, self.weights, self.needed_s = np.array(caps), weights, 0.0
        self.why = PlainWhy.NONE
        self.asked = asked = texts[0].ask
        self.arm = load.arms[asked.num_nodes > 0 and asked.with_models]
        # Where no drafts pay, or the guard allows none, the plan of a step without any holds until
        # enough steps of the same texts have been measured to tell another price.  Planning takes
        # a tenth of a step of a millisecond.
        self._num_left = evidence.FEW
        plain_s = target.steps.estimate(len(texts), 0)
        times_s = target.steps.at_edges(len(texts), moment.prompt_rows)
        assert plain_s is not None
        assert times_s is not None
        self.plain_s = plain_s
        rate = load.rate(float(weights.sum()) / plain_s)
        self.prices = Prices(rate, times_s - times_s[0], load.guard.max_extra_s(self.plain_s))
        self.ensemble = ensemble = Ensemble(target, acceptance, moment.residents, rate)
        value, arm = None, load.arms[True]
        if len(ensemble.models) > 1 and arm.num_turns:
            value = float(arm.values(weights, self.prices).max())
        self.teams = ensemble.look_ups(texts), ensemble.teams(texts, weights, value)
        self.draft_s = [ensemble.draft_s(each, load.num_new) for each in self.teams]
        # The kinds of residents that may be asked, by `Ask.with_models`.
        kinds = any(self.teams[False]), any(ensemble.have_models(self.teams[True]))
        self.kinds = [with_models for with_models in (False, True) if kinds[with_models]]

    def holds(self, texts: Sequence[Text], caps: Sequence[int], moment: Moment) -> bool:
        """True if its plan, which has no drafts and asks for none, holds for this step too: as long
        as the guard allows less than drafts need."""
        self._num_left -= 1
        return (
            self._num_left >= 0
            and not moment.prompt_rows
            and self.moment.residents == moment.residents
            and self.texts == texts
            and self.caps.tolist() == caps
            and self.load.guard.max_extra_s(self.plain_s) < self.needed_s
        )

    def plan(self, offers: Offers | None) -> Plan:
        """Return the plan for these offers."""
        load = self.load
        self._learn_worth(offers)
        ask, teams, draft_s = self._ask()
        if offers is None:
            no_worth = bool(self.moment.residents) and load.best == NO_DRAFTS
            self.why = PlainWhy.NOT_WORTH_IT if no_worth else PlainWhy.NO_DRAFTS
            if 0.0 < self.needed_s < math.inf:
                self.why = PlainWhy.GUARD
            load.promised = 0.0, self.arm
            return Plan.plain(self.texts, self.why, ask, teams)
        nodes, gains = self._ranking(offers)
        why, num_nodes = self._choose(gains, draft_s)
        nodes = nodes[:num_nodes]
        load.promised = float(offers.survival[nodes].sum()), self.arm
        return Plan(in_flight_of(offers, nodes), ask, why, teams)

    # Nodes to verify

    def _ranking(self, offers: Offers) -> tuple[Indices, Floats]:
        forest = offers.forest
        is_open = np.ones(forest.num_nodes, dtype=np.bool_)
        if (np.diff(forest.starts) > self.caps).any():
            nodes, ranks = ranked(offers.survival, forest.owners, forest.starts)
            is_open[nodes[ranks >= self.caps[forest.owners[nodes]]]] = False
        nodes, gains = ranking(
            offers.survival, self.arm.trust * self.weights[forest.owners], is_open
        )
        return nodes[: EDGES[-1]], gains[: EDGES[-1]]

    def _choose(self, gains: Floats, draft_s: float) -> tuple[PlainWhy, int]:
        """Return (the reason if no node is verified, how many of the best nodes are verified)."""
        load, prices = self.load, self.prices
        margin = _MARGIN * prices.rate * self.plain_s
        free = choose_nodes(gains, replace(prices, max_extra_s=math.inf))
        if free.value < margin:
            # What is not verified earns no trust, so what would pay if it had all is tried.
            arm = self.arm
            tried = choose_nodes(gains / arm.trust, prices, draft_s)
            if tried.value >= margin and arm.verified.begin(self.moment.now, tried.extra_s):
                return PlainWhy.NONE, tried.num_nodes
            return PlainWhy.NOT_WORTH_IT, 0
        load.verify_s += evidence.RECENT * (free.extra_s - load.verify_s)
        choice = choose_nodes(gains, prices, draft_s)
        if choice.value < margin:
            return PlainWhy.GUARD, 0
        return PlainWhy.NONE, choice.num_nodes

    # Drafts to ask for

    def _learn_worth(self, offers: Offers | None) -> None:
        """Learn how much the trees that were asked for after the last step have added."""
        asked = self.asked
        for with_models in self.kinds if asked.num_nodes else ():
            if with_models > asked.with_models:
                continue
            known = self.ensemble.have_models([text.asked for text in self.texts])
            if not with_models:
                known[:] = True
            ranks: Indices = np.empty(0, dtype=np.int64)
            survival = np.empty(0)
            if offers is not None:
                own = offers.forest.owners
                is_own = ~offers.is_pooled & known[own]
                if not with_models:
                    is_own &= offers.is_looked_up
                kept = np.where(is_own, offers.survival, np.float32(0.0))
                nodes, places = ranked(kept, own, offers.forest.starts)
                is_counted = is_own[nodes] & (places < self.caps[own[nodes]])
                ranks = places[is_counted]
                survival = offers.survival[nodes[is_counted]].astype(np.float64)
            if num_texts := int(known.sum()):
                self.load.arms[with_models].learn(ranks, survival, num_texts, asked.num_nodes)

    def _ask(self) -> tuple[Ask, list[Team], float]:
        """Return (the drafts to ask residents for after this step, the residents of each text, the
        seconds that they take)."""
        load, prices, now = self.load, self.prices, self.moment.now
        best, best_value, best_s = NO_DRAFTS, _MARGIN * prices.rate * self.plain_s, 0.0
        most = int(self.caps.max())
        sizes = [size for size in SIZES if size <= most] or [most]
        # It is no use to make drafts that the guard would not let a step verify.
        affordable_s = prices.max_extra_s - min(load.verify_s, self.plain_s)
        for with_models in self.kinds:
            draft_s = self.draft_s[with_models]
            if draft_s is None:  # the time is not known: measure it
                load.best = load.best or NO_DRAFTS
                return Ask(min(most, FIRST_NODES), with_models), self.teams[with_models], 0.0
            values = (self._values(with_models) - prices.rate * draft_s)[: len(sizes)]
            where = int(values.argmax())
            if values[where] >= best_value:
                best, best_value = Ask(sizes[where], with_models), float(values[where])
                best_s = float(draft_s[where])
        load.best = best
        # Trees of models show the worth of look-ups too, so only asks beyond the best one teach.
        known = (best.with_models and best.num_nodes > 0, best.num_nodes)
        for with_models in reversed(self.kinds):
            wanted = min(max(2 * best.num_nodes, FIRST_NODES), sizes[-1])
            if known >= (with_models, wanted):
                continue
            where = max(index for index, size in enumerate(sizes) if size <= wanted)
            draft_s, turn = self.draft_s[with_models], load.arms[with_models].tried
            assert draft_s is not None
            ask = Ask(sizes[where], with_models)
            teams, tried_s = self._with_reading(ask, float(draft_s[where]), affordable_s)
            if tried_s <= affordable_s and turn.begin(now, tried_s - best_s):
                return ask, teams, tried_s
        if best == NO_DRAFTS:
            self.needed_s = math.inf
        elif best_s > affordable_s:
            self.needed_s = prices.max_extra_s - affordable_s + best_s
            return NO_DRAFTS, [], 0.0
        teams, best_s = self._with_reading(best, best_s, affordable_s)
        if best.num_nodes and best.with_models:
            best_s += self.ensemble.add_tries(self.texts, teams, now, affordable_s - best_s)
        return best, teams, best_s

    def _values(self, with_models: bool) -> Floats:
        """Return what each of SIZES brings, less the price of verifying: texts of which no model
        drafts get what look-ups bring."""
        has_models = self.ensemble.have_models(self.teams[with_models])
        total: Floats = np.zeros(len(SIZES))
        for arm, is_own in zip(self.load.arms, (~has_models, has_models), strict=True):
            if is_own.any():
                total += arm.values(self.weights[is_own], self.prices)
        return total

    def _with_reading(
        self, ask: Ask, draft_s: float, affordable_s: float
    ) -> tuple[list[Team], float]:
        """Return the residents of each text and their seconds where models must first read texts:
        they read as many at once as are affordable, and at least one."""
        teams = list(self.teams[ask.with_models])
        if not (ask.num_nodes and ask.with_models):
            return teams, draft_s
        has_read = False
        for model in self.ensemble.models:
            read_s = self.target.drafting[model.name].read_s
            for place, text in enumerate(self.texts):
                if model.name not in teams[place] or text.is_read(model.name) or not read_s:
                    continue
                if has_read and draft_s + read_s > affordable_s:
                    teams[place] -= {model.name}
                else:
                    has_read, draft_s = True, draft_s + read_s
        return teams, draft_s
