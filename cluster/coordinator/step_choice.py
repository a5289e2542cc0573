"""One step's choice, made by the prices of the moment: nodes, what residents draft, or a wait."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cluster.coordinator.in_flight import InFlight
from cluster.coordinator.load import Load, TargetModel
from cluster.coordinator.offers import Offers, in_flight_of
from cluster.coordinator.texts import Text
from cluster.spec import evidence
from cluster.spec.acceptance import AcceptanceModel
from cluster.spec.budget import (
    NOTHING,
    Choice,
    Prices,
    choose_nodes,
    ranking,
)
from cluster.spec.forest import Floats, Indices, Mask, ranked
from cluster.spec.step_cost import DRAFT_LENGTHS, EDGES, NODE_EDGES, place
from cluster.spec.waiting import ArrivalTable, choose_wait

# While a drafter is new, a round may take so much longer than a plain one: claims are only claims.
_TIMID_SHARE = 0.1
# What speculation must promise beyond plain decoding, as a share of a step: less is the tables'
# own error.
_MARGIN = 0.01
# What changes slowly is looked at in one round of so many, for planning takes time as well: in
# PLAIN the trees at hand, and always what other draft lengths would have been worth.
LOOK_INTERVAL = 8
# Steps after which a time that was measured is worth measuring again.
_STALE_STEPS = 64
# Nodes of residents before it is known what drafting takes.
FIRST_NODES = 8
# Why a step has no drafts: to verify or to make some would not have paid.
NOT_WORTH_IT = "not worth it"


@dataclass(frozen=True, slots=True)
class Moment:
    """When a batch is planned.

    max_wait_s: how long it may wait for drafts.  waited_s: it has waited for this very step.
    has_residents: the target drafts when it is asked to.
    """

    now: float
    max_wait_s: float = 0.0
    waited_s: float = 0.0
    has_residents: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to do next: verify `in_flight`, one per text, or wait for drafts first.

    draft_nodes: what residents are to draft for each text after the step, 0 = nothing.
    wait_s > 0: better drafts are expected within so many seconds, for the texts `awaited`.
    why: in a word, why it is so, for the log and for statistics.
    """

    in_flight: list[InFlight]
    draft_nodes: int = 0
    wait_s: float = 0.0
    awaited: tuple[int, ...] = ()
    why: str = ""


@dataclass(slots=True, eq=False)
class StepChoice:
    """A batch that is being planned.

    caps: nodes of each text.  weights: of each text's tokens.  plain_s: a plain step.  draft_s:
    what residents take for each of DRAFT_LENGTHS, None = not known yet.
    """

    target: TargetModel
    load: Load
    texts: Sequence[Text]
    caps: Indices
    moment: Moment
    weights: Floats
    plain_s: float
    prices: Prices
    draft_s: Floats | None

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
        draft_times_s = target.drafting.at_edges(len(texts))
        draft_s = None
        if draft_times_s is not None:
            draft_s = np.interp(DRAFT_LENGTHS, NODE_EDGES, draft_times_s)
        rate = load.rate(float(weights.sum()) / plain_s)
        max_extra_s = load.guard.max_extra_s(plain_s) - moment.waited_s
        prices = Prices(rate, times_s - plain_s, max_extra_s)
        return cls(target, load, texts, np.array(caps), moment, weights, plain_s, prices, draft_s)

    def plan(
        self,
        offers: Offers | None,
        acceptance: AcceptanceModel,
        arrivals: Mapping[tuple[str, bool], ArrivalTable],
    ) -> Plan:
        """What to do with what drafters offer.  arrivals: by drafter and law."""
        load, moment, texts = self.load, self.moment, self.texts
        draft_nodes, draft_s, is_longer = self._draft_nodes()
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
            if choice.num_nodes == 0 and len(gains):
                free = Prices(self.prices.rate, self.prices.extra_s, math.inf)
                load.num_refusals += choose_nodes(gains, free).num_nodes > 0
            if load.asked and (load.is_longer or load.num_rounds % LOOK_INTERVAL == 0):
                self._price_lengths(offers)
        margin = _MARGIN * self.prices.rate * self.plain_s
        if choice.value < margin:
            choice = NOTHING
        if moment.max_wait_s > 0.0 and moment.waited_s == 0.0 and self._answers_are_due():
            wait = self._wait(acceptance, arrivals, nodes, gains, offers, choice.value + margin)
            if wait is not None:
                load.throttle.judged(moment.now, is_worth=True)
                return wait
        is_worth = choice.num_nodes > 0 or 0 < draft_nodes <= load.asked
        load.throttle.judged(moment.now, is_worth=is_worth)
        load.is_longer = is_longer
        num_nodes = self._explored(gains, choice)
        is_known = moment.has_residents and self.draft_s is not None
        why = "no drafts"
        if num_nodes or len(gains):
            why = "verify" if num_nodes else NOT_WORTH_IT
        elif is_known and draft_nodes == 0:
            why = NOT_WORTH_IT  # residents would have drafted
        return Plan(in_flight_of(texts, offers, nodes[:num_nodes]), draft_nodes, why=why)

    def _ranking(self, offers: Offers) -> tuple[Indices, Floats]:
        forest = offers.forest
        is_open = np.ones(forest.num_nodes, dtype=np.bool_)
        if (np.diff(forest.starts) > self.caps).any():
            nodes, ranks = ranked(offers.survival, forest.owners, forest.starts)
            is_open[nodes[ranks >= self.caps[forest.owners[nodes]]]] = False
        nodes, gains = ranking(offers.survival, self.weights[forest.owners], is_open)
        return nodes[: EDGES[-1]], gains[: EDGES[-1]]

    # What residents draft

    def _draft_nodes(self) -> tuple[int, float, bool]:
        """(nodes that residents draft for each text after this step, seconds that this takes,
        whether that is more than what pays)."""
        load, now = self.load, self.moment.now
        if not self.moment.has_residents:
            return 0, 0.0, False
        most = int(self.caps.max())
        if self.draft_s is None:  # nobody knows what it takes: find out
            return min(most, FIRST_NODES), 0.0, True
        best, value = load.lengths.choose(self.draft_s, self.prices.rate, most)
        if value < _MARGIN * self.prices.rate * self.plain_s:
            best = 0
        costs_s = dict(zip(DRAFT_LENGTHS.tolist(), self.draft_s.tolist(), strict=True)) | {0: 0.0}
        longest = max(length for length in costs_s if length <= most)
        extra_s = costs_s[longest] - costs_s[best]
        is_longer = longest > best and load.longer.is_due(now, extra_s)
        wanted = longest if is_longer else best
        if costs_s[wanted] > self.prices.max_extra_s:
            return 0, 0.0, False
        if is_longer:
            load.longer.take(now)
        return wanted, costs_s[wanted], is_longer

    def _price_lengths(self, offers: Offers) -> None:
        """Learn what shorter trees than those at hand would have been worth."""
        forest, load = offers.forest, self.load
        nodes, ranks = ranked(offers.survival, forest.owners, forest.starts)
        rank_of = np.empty(forest.num_nodes, dtype=np.int64)
        rank_of[nodes] = ranks
        weights = self.weights[forest.owners]
        free = Prices(self.prices.rate, self.prices.extra_s, math.inf)

        def value(is_open: Mask) -> float:
            is_open = is_open & (rank_of < self.caps[forest.owners])
            return choose_nodes(ranking(offers.survival, weights, is_open)[1], free).value

        without = value(offers.is_pooled) if offers.is_pooled.any() else 0.0
        lengths = DRAFT_LENGTHS[load.asked >= DRAFT_LENGTHS]
        values = [value(offers.is_pooled | (rank_of < length)) - without for length in lengths]
        load.lengths.learn(np.array(values))

    # Exploration

    def _explored(self, gains: Floats, choice: Choice) -> int:
        """The number of nodes to verify: the best one, or now and then another, to measure it."""
        load, now, size = self.load, self.moment.now, len(self.texts)
        best = choice.num_nodes
        if best == 0:
            return 0
        steps, rate = self.target.steps, self.prices.rate
        if load.plain.is_due(now, choice.value / rate) and steps.age(size, 0) > 1:
            load.plain.take(now)
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

    # Waiting

    def _answers_are_due(self) -> bool:
        return any(
            answer.is_missed and not answer.is_complete
            for text in self.texts
            for answer in text.answers.values()
        )

    def _wait(
        self,
        acceptance: AcceptanceModel,
        arrivals: Mapping[tuple[str, bool], ArrivalTable],
        nodes: Indices,
        gains: Floats,
        offers: Offers | None,
        least: float,
    ) -> Plan | None:
        """The wait that is worth more than `least`, if there is one."""
        awaited: list[int] = []
        arriving: list[Floats] = []
        for index, text in enumerate(self.texts):
            if self.caps[index] == 0:
                continue
            tables = [
                table.expected()
                for name, answer in text.answers.items()
                if answer.is_missed and not answer.is_complete
                and answer.context_len == len(text.tokens)
                and acceptance.known(name, text.group).num_trees >= evidence.FEW
                and (table := arrivals.get((name, text.is_sampled))) is not None
            ]  # fmt: skip
            if tables:
                best = max(tables, key=lambda table: float(table.sum()))
                if best.any():
                    awaited.append(index)
                    arriving.append(best * self.weights[index])
        if not awaited:
            return None
        if offers is not None:
            gains = gains[~np.isin(offers.forest.owners[nodes], awaited)]
        max_wait_s = min(self.moment.max_wait_s, self.prices.max_extra_s)
        found = choose_wait(gains, np.array(arriving), self.prices, max_wait_s, least)
        if found is None:
            return None
        return Plan([], wait_s=found.wait_s, awaited=tuple(awaited), why="wait")

    def _has_newcomer(self, acceptance: AcceptanceModel) -> bool:
        """Whether a drafter is at hand whose claims have hardly been held against texts yet."""
        keys = {
            (name, text.group)
            for text in self.texts
            for name, held in text.held.items()
            if not held.is_shadow
        }
        return any(acceptance.known(*key).num_trees < evidence.FEW for key in keys)
