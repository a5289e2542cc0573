"""Chooses for each text of a batch which residents draft for it, if models do.

Look-ups take hardly any time, so all of them are asked.  Of the models a text gets the one that
promises most in it: its outcomes in this text, and what it is worth in others while these are few
(`cluster.spec.budget`).  A turn of a model takes much of its time whatever the number of texts,
so beside the best one of the batch another is asked only if it pays.  The others are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from operator import itemgetter

import numpy as np

from cluster.plan.load import TargetModel
from cluster.plan.texts import Resident, Team, Text
from cluster.spec import evidence
from cluster.spec.acceptance import AcceptanceModel, Group
from cluster.spec.budget import FIRST_NODES, SIZES, Exploration
from cluster.spec.tree import Floats, Mask

# A model that promises less than this share of the best one is not tried in each text: it takes
# turns for all of them.
_HOPEFUL_SHARE = 0.25


class Ensemble:
    """The residents that may be asked in a step, at present prices.

    models: those that are no look-ups.  Shadows among them are tried only, unless there are no
    others.
    """

    def __init__(
        self,
        target: TargetModel,
        acceptance: AcceptanceModel,
        residents: Sequence[Resident],
        rate: float,
    ) -> None:
        """rate: weighted tokens per second."""
        self._target, self._residents, self._rate = target, residents, rate
        self._look_ups = Team(each.name for each in residents if each.is_look_up)
        self.models = [each for each in residents if not each.is_look_up]
        self._model_names = Team(each.name for each in self.models)
        # Asked for again and again within a step.
        self._priors = cache(partial(_priors, acceptance, self.models))
        self._turn_s = cache(lambda each, count: target.drafting[each.name].seconds(count))

    def draft_s(self, teams: Sequence[Team], num_new: float) -> Floats | None:
        """Return the seconds in which the residents of these teams draft trees of SIZES for each
        text, with the time in which models read new texts; None if one of them was never measured.
        """
        total: Floats = np.zeros(len(SIZES))
        for each in self._residents:
            count = sum(each.name in team for team in teams)
            if count == 0:
                continue
            seconds = self._turn_s(each, count)
            if seconds is None:
                return None
            total += (
                seconds + num_new * count / len(teams) * self._target.drafting[each.name].read_s
            )
        return total

    def have_models(self, teams: Sequence[Team | None]) -> Mask:
        """Return which of the teams have a model; None = all."""
        names = self._model_names
        return np.array([not names.isdisjoint(names if each is None else each) for each in teams])

    def look_ups(self, texts: Sequence[Text]) -> list[Team]:
        """Return each text's look-ups."""
        return [self._look_ups.intersection(text.names) for text in texts]

    def teams(
        self, texts: Sequence[Text], weights: Floats, value: float | None = None
    ) -> list[Team]:
        """Return each text's look-ups and models.

        weights: of each text's tokens.  value: the weighted tokens that models' trees of late bring
        to these texts, less the price of verifying them; None = not known."""
        teams, models = self.look_ups(texts), self.models
        if not models:
            return teams
        worth = np.array([self._worth(*each) for each in zip(texts, weights, strict=True)])
        promised = float(np.maximum(worth.max(axis=1), 0.0).sum())
        if value and promised:
            # Trees are worth less, since nodes take time to verify, or more, since they have more
            # than a few.
            worth *= value / promised
        worth -= [[self._price_of_reading(each, text) for each in models] for text in texts]
        for place, pick in enumerate(self._best(worth)):
            if pick >= 0:
                teams[place] |= {models[pick].name}
        return teams

    def add_tries(
        self, texts: Sequence[Text], teams: list[Team], now: float, affordable_s: float
    ) -> float:
        """Add to each text's team the model that is to be tried for it, if the turn of one has
        come; returns the seconds of all tries, at most affordable_s.

        A model that drafts for other texts anyway takes only its time for one text more.  All texts
        wait for a try in one of them, so each may take its share of the time that tries may take.
        """
        if len(self.models) < 2:
            return 0.0
        spent_s = 0.0
        counts = [sum(model.name in team for team in teams) for model in self.models]
        for place, text in enumerate(texts):
            priors = self._priors(text.group)
            hopeful = _HOPEFUL_SHARE * max(priors)
            for number, model in enumerate(self.models):
                if model.name in teams[place] or not text.may_ask(model.name):
                    continue
                turn = self._target.tries[text.is_sampled, model.name]
                if model.name in text.shadows or priors[number] >= hopeful:
                    turn = text.standing.turns.setdefault(model.name, Exploration())
                count = counts[number]
                cost_s = self._seconds(model, count + 1) - self._seconds(model, count)
                if not text.is_read(model.name):
                    cost_s += self._target.drafting[model.name].read_s
                is_affordable = spent_s + cost_s <= affordable_s
                if is_affordable and turn.begin(now, cost_s * len(texts)):
                    teams[place] |= {model.name}
                    counts[number] += 1
                    spent_s += cost_s
                    break
        return spent_s

    def _may_draft(self, model: Resident, text: Text) -> bool:
        """True if its drafts for the text may be verified."""
        if not text.shadows:
            return text.may_ask(model.name)
        own = [each.name for each in self.models if text.may_ask(each.name)]
        # Where all of them are scored only, one is asked all the same.
        return model.name in own and (model.name not in text.shadows or text.shadows >= {*own})

    def _worth(self, text: Text, weight: float) -> list[float]:
        """Return the weighted tokens that each model promises; -inf: it does not draft for it."""
        place, standing = len(text.tokens), text.standing
        return [
            weight * standing.expected(each.name, place, prior)
            if self._may_draft(each, text)
            else -np.inf
            for each, prior in zip(self.models, self._priors(text.group), strict=True)
        ]

    def _price_of_reading(self, model: Resident, text: Text) -> float:
        """Return the weighted tokens that a turn is to bring for the reading before it, which the
        turns that are enough for an estimate are to pay."""
        if text.is_read(model.name):
            return 0.0
        return self._rate * self._target.drafting[model.name].read_s / evidence.FEW

    def _best(self, worth: Floats) -> list[int]:
        """Return the number of the model for each text, -1 = none.

        The best one alone comes first, whether it pays or not, which is decided by what residents
        add to what is at hand; then others, as long as they pay beside it."""
        active = list[int]()
        value, picks = -np.inf, [-1] * len(worth)
        while len(active) < len(self.models):
            wider = ([*active, each] for each in range(len(self.models)) if each not in active)
            found = max(((*self._value(worth, each), each) for each in wider), key=itemgetter(0))
            if found[0] <= value:
                break
            value, picks, active = found
        return picks

    def _seconds(self, model: Resident, num_texts: int) -> float:
        """Return the seconds of a turn with trees of the first size; 0 if none was measured."""
        found = self._turn_s(model, num_texts) if num_texts else None
        return 0.0 if found is None else float(found[SIZES.index(FIRST_NODES)])

    def _value(self, worth: Floats, active: list[int]) -> tuple[float, list[int]]:
        """Return what these models are worth less the price of their time, and each text's one."""
        own = worth[:, active]
        most = own.max(axis=1)
        picks = [
            active[place] if value > -np.inf else -1
            for place, value in zip(own.argmax(axis=1).tolist(), most.tolist(), strict=True)
        ]
        spent_s = sum(self._seconds(self.models[each], picks.count(each)) for each in active)
        if max(picks) < 0:
            return -np.inf, picks
        return float(most[most > -np.inf].sum()) - self._rate * spent_s, picks


def _priors(acceptance: AcceptanceModel, models: Sequence[Resident], group: Group) -> list[float]:
    """Return what each model is worth in such texts; one that is new, as much as the best."""
    scores = [acceptance.known(each.name, group) for each in models]
    weights = [score.weight() for score in scores]
    best = max(weights)
    return [
        best + (weight - best) * score.num_trees / (score.num_trees + evidence.PRIOR)
        for weight, score in zip(weights, scores, strict=True)
    ]
