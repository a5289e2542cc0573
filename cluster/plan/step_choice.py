"""One step's choice, made by the prices of the moment: nodes, and what residents draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cluster.plan.in_flight import NOT_WORTH_IT, Moment, Plan
from cluster.plan.load import ByModels, Load, TargetModel
from cluster.plan.offers import Offers, in_flight_of
from cluster.plan.texts import Text
from cluster.spec import evidence
from cluster.spec.acceptance import AcceptanceModel
from cluster.spec.budget import (
    NO_DRAFTS,
    NOTHING,
    Ask,
    Choice,
    Prices,
    choose_nodes,
    ranking,
)
from cluster.spec.forest import Floats, Indices, Mask, ranked
from cluster.spec.step_cost import DRAFT_LENGTHS, EDGES, place

# While a drafter is new, a round may take so much longer than a plain one: claims are only claims.
_TIMID_SHARE = 0.1
# What speculation must promise beyond plain decoding, as a share of a step: less is the tables'
# own error.
_MARGIN = 0.01
# Drafting that costs so many times what its trees have been worth gets few first tries.
_HOPELESS = 4.0
# What changes slowly is looked at in one round of so many, for planning takes time as well: in
# PLAIN the trees at hand, and always what other draft lengths would have been worth.
LOOK_INTERVAL = 8
# Steps after which a time that was measured is worth measuring again.
_STALE_STEPS = 64
# What a plain step is taken to cost, as a share of it: speculation seldom gains more than twice.
_PLAIN_COST = 0.5
# Nodes of residents before it is known what drafting takes.
FIRST_NODES = 8


@dataclass(slots=True, eq=False)
class StepChoice:
    """A batch that is being planned.

    caps: nodes of each text.  weights: of each text's tokens.  plain_s: a plain step.  draft_s:
    what residents take for each of DRAFT_LENGTHS, look-ups and models with what these read; None =
    not known yet.
    """

    target: TargetModel
    load: Load
    texts: Sequence[Text]
    caps: Indices
    moment: Moment
    weights: Floats
    plain_s: float
    prices: Prices
    draft_s: ByModels[Floats | None]

    @classmethod
    def of(
        cls,
        target: TargetModel,
        load: Load,
        texts: Sequence[Text],
        caps: Sequence[int],
        moment: Moment,
    ) -> StepChoice | None:
        """None while nothing is known of what steps take."""
        times_s = target.steps.at_edges(len(texts))
        if times_s is None:
            return None
        plain_s = float(times_s[0])
        weights = np.array([text.weight / text.tokens_per_step for text in texts])
        look_ups_s, models_s = (table.of_lengths(len(texts)) for table in target.drafting)
        if models_s is not None:  # they read every text once
            models_s = models_s + load.num_new * target.read_s
        rate = load.rate(float(weights.sum()) / plain_s)
        max_extra_s = load.guard.max_extra_s(plain_s)
        prices = Prices(rate, times_s - plain_s, max_extra_s)
        return cls(
            target, load, texts, np.array(caps), moment, weights, plain_s, prices,
            (look_ups_s, models_s),
        )  # fmt: skip

    def plan(self, offers: Offers | None, acceptance: AcceptanceModel) -> Plan:
        """What to do with what drafters offer."""
        load, moment, texts = self.load, self.moment, self.texts
        ask, draft_s, is_longer = self._ask()
        nodes: Indices = np.empty(0, dtype=np.int64)
        gains: Floats = np.empty(0)
        choice = NOTHING
        if offers is not None:
            nodes, gains = self._ranking(offers)
            prices = self.prices
            if self._has_newcomer(acceptance):
                bold_s = draft_s + _TIMID_SHARE * self.plain_s
                prices = replace(prices, max_extra_s=min(prices.max_extra_s, bold_s))
            choice = choose_nodes(gains, prices, spent_s=draft_s)
            free = choose_nodes(gains, replace(prices, max_extra_s=math.inf))
            if free.num_nodes:
                load.num_refusals += choice.num_nodes == 0
                load.verify_s += evidence.RECENT * (free.extra_s - load.verify_s)
        if load.asked.num_nodes and (load.is_longer or load.num_rounds % LOOK_INTERVAL == 0):
            self._price_lengths(offers)
        margin = _MARGIN * self.prices.rate * self.plain_s
        if choice.value < margin:
            choice = NOTHING
        is_worth = choice.num_nodes > 0 or 0 < ask.num_nodes <= load.asked.num_nodes
        load.throttle.judged(moment.now, is_worth=is_worth)
        load.is_longer = is_longer
        num_nodes = self._explored(gains, choice)
        why = "no drafts"
        if num_nodes or len(gains):
            why = "verify" if num_nodes else NOT_WORTH_IT
        elif moment.residents and ask.num_nodes == 0:
            why = NOT_WORTH_IT  # residents would have drafted
        promised = 0.0 if offers is None else float(offers.survival[nodes[:num_nodes]].sum())
        load.promised = promised, load.trust
        return Plan(in_flight_of(texts, offers, nodes[:num_nodes]), ask, why=why)

    def _ranking(self, offers: Offers) -> tuple[Indices, Floats]:
        forest = offers.forest
        is_open = np.ones(forest.num_nodes, dtype=np.bool_)
        if (np.diff(forest.starts) > self.caps).any():
            nodes, ranks = ranked(offers.survival, forest.owners, forest.starts)
            is_open[nodes[ranks >= self.caps[forest.owners[nodes]]]] = False
        weights = self.load.trust.share * self.weights[forest.owners]
        nodes, gains = ranking(offers.survival, weights, is_open)
        return nodes[: EDGES[-1]], gains[: EDGES[-1]]

    # What residents draft

    def _ask(self) -> tuple[Ask, float, bool]:
        """(what residents draft after this step, seconds that this takes, whether that is more than
        what pays)."""
        if self.load.asked.num_nodes and self._takes_plain(
            _STALE_STEPS, _PLAIN_COST * self.plain_s
        ):
            return NO_DRAFTS, 0.0, False  # so that the next step tells what a plain one takes
        best, best_value, best_s = NO_DRAFTS, _MARGIN * self.prices.rate * self.plain_s, 0.0
        most = int(self.caps.max())
        # Drafts that the guard would not let be verified are drafted for nothing.
        affordable_s = self.prices.max_extra_s - min(self.load.verify_s, self.plain_s)
        for with_models in self.moment.residents:
            draft_s = self.draft_s[with_models]
            if draft_s is None:  # nobody knows what it takes: find out
                return Ask(min(most, FIRST_NODES), with_models), 0.0, True
            lengths = self.load.lengths[with_models]
            num_nodes, value = lengths.choose(draft_s, self.prices.rate, most)
            if value >= best_value:
                best, best_value = Ask(num_nodes, with_models), value
                best_s = float(draft_s[num_nodes == DRAFT_LENGTHS][0])
        self.load.best = best
        # Trees of models tell of look-ups too, so only what is beyond the best tells something new.
        known = (best.with_models and best.num_nodes > 0, best.num_nodes)
        for with_models in reversed(self.moment.residents):
            longer, longer_s = self._longer(with_models, best.num_nodes, most)
            turn = self.load.longer[with_models]
            if known >= (with_models, longer.num_nodes):
                continue
            tried, tried_s = self._with_reading(longer, longer_s, affordable_s)
            if tried_s <= affordable_s and turn.is_due(
                self.moment.now, tried_s - best_s, self._num_first(longer, longer_s)
            ):
                turn.take(self.moment.now)
                return tried, tried_s, True
        if best_s > affordable_s:
            return NO_DRAFTS, 0.0, False
        return *self._with_reading(best, best_s, affordable_s), False

    def _with_reading(self, ask: Ask, draft_s: float, affordable_s: float) -> tuple[Ask, float]:
        """What is asked and what it takes, where models must read texts first: no more at once than
        is affordable, but one."""
        if not (ask.num_nodes and ask.with_models and self.target.read_s):
            return ask, draft_s
        unread = [place for place, text in enumerate(self.texts) if not text.is_read]
        num_read = max(int((affordable_s - draft_s) / self.target.read_s), 1)
        draft_s += self.target.read_s * min(num_read, len(unread))
        return replace(ask, unread=frozenset(unread[num_read:])), draft_s

    def _takes_plain(self, least_age: int, cost_s: float) -> bool:
        """Whether to learn now what a plain step takes, at the price of cost_s, where the last one
        was more than least_age steps ago."""
        plain, now = self.load.plain, self.moment.now
        age = self.target.steps.age(len(self.texts), 0)
        if age <= least_age or not plain.is_due(now, cost_s):
            return False
        plain.take(now)
        return True

    def _num_first(self, ask: Ask, draft_s: float) -> int:
        """Drafts that are worth much are rare, so few tries tell little, unless the costs are far
        beyond what was seen."""
        seen = self.load.lengths[ask.with_models].value(ask.num_nodes)
        return evidence.FEW if _HOPELESS * seen >= self.prices.rate * draft_s else 0

    def _longer(self, with_models: bool, num_nodes: int, most: int) -> tuple[Ask, float]:
        """Trees twice as large as those that pay, as far as is allowed, and what they take."""
        draft_s = self.draft_s[with_models]
        assert draft_s is not None
        wanted = min(max(2 * num_nodes, FIRST_NODES), most)
        index = int(np.searchsorted(DRAFT_LENGTHS, wanted, side="right")) - 1
        return Ask(int(DRAFT_LENGTHS[index]), with_models), float(draft_s[index])

    def _price_lengths(self, offers: Offers | None) -> None:
        """Learn what other trees than those at hand would have been worth: shorter ones, and those
        of look-ups alone.  Nothing at hand is worth nothing."""
        asked = self.load.asked
        lengths = DRAFT_LENGTHS[asked.num_nodes >= DRAFT_LENGTHS]
        for with_models in self.moment.residents:
            if with_models <= asked.with_models:
                values = np.zeros(len(lengths))
                if offers is not None:
                    values = self._values(offers, lengths, with_models=with_models)
                self.load.lengths[with_models].learn(values)

    def _values(self, offers: Offers, lengths: Indices, *, with_models: bool) -> Floats:
        """What the best nodes of residents are worth beside the pool's, so many of each text."""
        forest = offers.forest
        trust = self.load.trusts[with_models].share
        weights, caps = trust * self.weights[forest.owners], self.caps[forest.owners]
        free = Prices(self.prices.rate, self.prices.extra_s, math.inf)

        # Where models were asked for some texts, the others are taken to be like these.
        is_known = np.ones(len(self.texts), np.bool_)
        if with_models and self.load.asked.unread:
            is_known = np.array([text.is_read for text in self.texts])
        num_alike = round(len(is_known) / max(int(is_known.sum()), 1))

        def value(is_open: Mask) -> float:
            gains = ranking(offers.survival, weights, is_open & is_known[forest.owners])[1]
            return choose_nodes(np.repeat(gains, num_alike), free).value

        own = np.ones(forest.num_nodes, np.bool_) if with_models else offers.is_looked_up
        survival = np.where(own | offers.is_pooled, offers.survival, np.float32(0.0))
        nodes, ranks = ranked(survival, forest.owners, forest.starts)
        rank_of = np.empty(forest.num_nodes, dtype=np.int64)
        rank_of[nodes] = ranks
        own = own & (rank_of < caps)
        pooled = offers.is_pooled & (rank_of < caps)
        without = value(pooled) if pooled.any() else 0.0
        return np.array([value(pooled | (own & (rank_of < each))) - without for each in lengths])

    # Exploration

    def _explored(self, gains: Floats, choice: Choice) -> int:
        """The number of nodes to verify: the best one, or now and then another, to measure it."""
        load, now, size = self.load, self.moment.now, len(self.texts)
        best = choice.num_nodes
        if best == 0:
            return 0
        steps, rate = self.target.steps, self.prices.rate
        # Where residents draft, steps after which they were asked nothing tell it.
        if load.asked.num_nodes == 0 and self._takes_plain(1, choice.value / rate):
            return 0
        where = place(best)
        around = [EDGES[index] for index in (where - 1, where + 1) if 0 < index < len(EDGES)]
        around = [count for count in around if 0 < count <= len(gains)]
        if around:
            other = max(around, key=lambda count: steps.age(size, count))
            extra_s = float(self.prices.extra_s[place(other)])
            value = float(gains[:other].sum()) - rate * extra_s
            is_allowed = extra_s <= self.prices.max_extra_s
            cost_s = max(choice.value - value, 0.0) / rate
            if (
                is_allowed
                and load.sizes.is_due(now, cost_s)
                and steps.age(size, other) > _STALE_STEPS
            ):
                load.sizes.take(now)
                return other
        return best

    def _has_newcomer(self, acceptance: AcceptanceModel) -> bool:
        """Whether a drafter is at hand whose claims have hardly been held against texts yet."""
        keys = {
            (name, text.group)
            for text in self.texts
            for name, held in text.held.items()
            if not held.is_shadow
        }
        return any(acceptance.known(*key).num_trees < evidence.FEW for key in keys)
