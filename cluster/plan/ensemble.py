"""Chooses for each text of a batch which residents draft for it, if models do.

Look-ups take hardly any time, so all of them are asked.  Of the models a text gets the one that
promises most in it: its outcomes in this text, and what it is worth in others while these are few
(`cluster.plan.standing`).  A turn of a model takes much of its time whatever the number of texts,
so one that few texts prefer must bring enough to them.  Another model is asked beside it where what
it adds,

    E[max(a_other - a_best, 0)]        over places where the trees of both were held,

is more than its time is worth: accepted nodes are a beginning of the text, so two trees bring what
the better one brings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.plan.arms import SIZES
from cluster.plan.load import TargetModel
from cluster.plan.resident import Resident
from cluster.plan.standing import Turn
from cluster.plan.texts import Text
from cluster.spec import evidence
from cluster.spec.acceptance import AcceptanceModel, Group
from cluster.spec.forest import Floats

# The size of trees whose time is compared: that of the first ones.
_SIZE = SIZES.index(8)
# A model that promises less than this share of the best one is not tried in each text: it takes
# turns for all of them.
_HOPEFUL_SHARE = 0.25


def draft_s(
    target: TargetModel, masks: Sequence[int], residents: Sequence[Resident], num_new: float
) -> Floats | None:
    """Return the seconds in which the residents of these masks draft trees of SIZES for each text,
    with the time in which models read new texts; None if one of them was never measured."""
    total: Floats = np.zeros(len(SIZES))
    for each in residents:
        count = sum(mask & each.bit > 0 for mask in masks)
        if count == 0:
            continue
        times = target.drafting[each.name]
        seconds = times.seconds(count)
        if seconds is None:
            return None
        total = total + seconds + num_new * count / len(masks) * times.read_s
    return total


class Ensemble:
    """The residents that may be asked in a step, at present prices.

    models: those that are no look-ups, and model_bits: their mask.  Shadows among them are tried
    only, unless there are no others.
    """

    def __init__(
        self,
        target: TargetModel,
        acceptance: AcceptanceModel,
        residents: Sequence[Resident],
        rate: float,
    ) -> None:
        """rate: weighted tokens per second."""
        self._target, self._acceptance, self._rate = target, acceptance, rate
        self._look_ups = [each for each in residents if each.is_look_up]
        self.models = [each for each in residents if not each.is_look_up]
        self.model_bits = sum(each.bit for each in self.models)
        # Asked for again and again within a step.
        self._known_priors: dict[Group, list[float]] = {}
        self._known_s: dict[tuple[str, int], float] = {}

    def look_ups(self, texts: Sequence[Text]) -> list[int]:
        """Return the mask of each text's look-ups."""
        own = [(each.name, each.bit) for each in self._look_ups]
        return [sum(bit for name, bit in own if name in text.names) for text in texts]

    def teams(self, texts: Sequence[Text], weights: Floats) -> list[int]:
        """Return the mask of each text's look-ups and models.  weights: of each text's tokens."""
        masks, models = self.look_ups(texts), self.models
        if len(models) == 1:
            (model,) = models
            return [
                mask | model.bit * text.may_ask(model.name)
                for mask, text in zip(masks, texts, strict=True)
            ]
        if models:
            picks = self._best([self._worth(*each) for each in zip(texts, weights, strict=True)])
            picked = [None if pick < 0 else models[pick] for pick in picks]
            for place, pick in enumerate(picked):
                masks[place] |= 0 if pick is None else pick.bit
            self._add_second(masks, picked, texts, weights)
        return masks

    def due(self, text: Text, mask: int, now: float) -> tuple[Resident, Turn, float] | None:
        """Return the model that is to be tried for a text beside those of `mask`, whose turn it is,
        and the seconds that this takes; None = it is nobody's."""
        models = self.models
        priors = self._priors(text) if len(models) > 1 else []
        for model, prior in zip(models, priors, strict=False):
            if model.bit & mask or not text.may_ask(model.name):
                continue
            turn = self._target.tries[text.is_sampled, model.name]
            if model.name in text.shadows or prior >= _HOPEFUL_SHARE * max(priors):
                turn = text.standing.turns.setdefault(model.name, Turn())
            times = self._target.drafting[model.name]
            cost_s = self._seconds(model, 1) + times.read_s * (not text.is_read(model.name))
            if turn.is_due(now, cost_s):
                return model, turn, cost_s
        return None

    def _priors(self, text: Text) -> list[float]:
        """Return what each model is worth in such texts; one that is new, as much as the best."""
        found = self._known_priors.get(text.group)
        if found is not None:
            return found
        scores = [self._acceptance.known(each.name, text.group) for each in self.models]
        weights = [score.weight() for score in scores]
        best = max(weights)
        found = self._known_priors[text.group] = [
            best + (weight - best) * score.num_trees / (score.num_trees + evidence.FIRST_TRIES)
            for weight, score in zip(weights, scores, strict=True)
        ]
        return found

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
            for each, prior in zip(self.models, self._priors(text), strict=True)
        ]

    def _best(self, worth: list[list[float]]) -> list[int]:
        """Return the number of the model for each text, -1 = none, of those that pay together."""
        table, active = np.array(worth), list(range(len(worth[0])))
        value, picks = self._value(table, active)
        while len(active) > 1:
            rests = [[each for each in active if each != left] for left in active]
            found = [self._value(table, rest) for rest in rests]
            # Whether a model drafts at all is decided by what residents add to what is at hand.
            found = [each if max(each[1]) >= 0 else (-np.inf, each[1]) for each in found]
            best = max(range(len(rests)), key=lambda place: found[place][0])
            if found[best][0] <= value:
                break
            active, (value, picks) = rests[best], found[best]
        return picks

    def _value(self, table: Floats, active: list[int]) -> tuple[float, list[int]]:
        """Return what these models are worth less the price of their time, and each text's one."""
        own = table[:, active]
        most = own.max(axis=1)
        picks = [
            active[place] if value > -np.inf else -1
            for place, value in zip(own.argmax(axis=1).tolist(), most.tolist(), strict=True)
        ]
        spent_s = sum(
            self._seconds(self.models[each], picks.count(each)) for each in active if each in picks
        )
        return float(most[most > -np.inf].sum()) - self._rate * spent_s, picks

    def _add_second(
        self,
        masks: list[int],
        picked: Sequence[Resident | None],
        texts: Sequence[Text],
        weights: Floats,
    ) -> None:
        """Add the model that adds most to those that were picked, if it pays."""
        best_value, best = 0.0, dict[int, Resident]()
        for model in self.models:
            gains = {
                place: float(weights[place])
                * self._acceptance.beside(text.group, first.name, model.name)
                for place, (text, first) in enumerate(zip(texts, picked, strict=True))
                if first is not None and first is not model and self._may_draft(model, text)
            }
            count = sum(first is model for first in picked)
            spent_s = self._seconds(model, count + len(gains)) - self._seconds(model, count)
            value = sum(gains.values()) - self._rate * spent_s
            if value > best_value:
                best_value, best = value, dict.fromkeys(gains, model)
        for place, model in best.items():
            masks[place] |= model.bit

    def _seconds(self, model: Resident, num_texts: int) -> float:
        """Return the seconds of a turn; 0 if none was measured."""
        key = model.name, num_texts
        if key not in self._known_s:
            found = self._target.drafting[model.name].seconds(num_texts) if num_texts else None
            self._known_s[key] = 0.0 if found is None else float(found[_SIZE])
        return self._known_s[key]
