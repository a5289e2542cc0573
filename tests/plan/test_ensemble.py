"""Which of several models a text asks, by what they have brought in it."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from benchmarks.replay import synthetic
from benchmarks.replay.machines import MACHINES
from benchmarks.replay.synthetic import KINDS, USELESS, Leads, kind_at
from cluster.core import TokenTree, token_array
from cluster.plan.ensemble import Ensemble
from cluster.plan.load import TargetModel
from cluster.plan.roster import DraftScores
from cluster.plan.texts import Resident, Text
from cluster.simulate.replay import Adaptive, Outcome, Playing, Simulation
from cluster.simulate.world import Pool, recorded
from cluster.spec.acceptance import AcceptanceModel
from cluster.spec.budget import FIRST_NODES, SIZES, Ask, Exploration, Standing
from cluster.spec.native.trees import Seen
from cluster.spec.step_profile import DraftTime
from tests.support.choices import by_day, by_night
from tests.support.plan.played import GROUP, text_of

SECONDS = by_day(4.0, 8.0)
specialists = cache(synthetic.specialists)


class Noted(Adaptive):
    """The target's own controller, from which the kinds of the texts are hidden.

    asked: number of rounds by (quarter of the text, kind there, the models that were asked), once
    something is known.
    """

    asked: Counter[Any]

    def plan(self, batch: Sequence[Playing], now: float, prompt_rows: int) -> Sequence[TokenTree]:
        for own in batch:
            own.text.group = "default", own.recorded.is_sampled
        trees = super().plan(batch, now, prompt_rows)
        for own in batch if now > SECONDS / 2 else ():
            if not own.text.ask.num_nodes:
                continue
            names = [each.name for each in self._pool.residents if own.text.asks(each.name)]
            kind = kind_at(own.recorded, own.position)
            self.asked[own.position * 4 // len(own.recorded.token_ids), kind, *names] += 1
        return trees


def played(leads: Leads, names: Sequence[str] = KINDS) -> tuple[Outcome, Counter[Any]]:
    """Return what was asked beside the outcome."""
    machine = replace(MACHINES["cpu"], read_s=0.00003)
    pool = Pool({name: recorded(name) for name in names}, frozenset(names))
    own = Noted(machine, pool)
    own.asked = Counter()
    return Simulation(specialists(12, leads), machine, pool, 1).run(own, SECONDS), own.asked


def share(asked: Counter[Any], *, quarter: int) -> float:
    """Return the share of rounds that asked the kind's own specialist alone."""
    own = {key: count for key, count in asked.items() if key[0] == quarter}
    return sum(count for key, count in own.items() if key[1:] == (key[1], key[1])) / sum(
        own.values()
    )


def test_a_text_asks_the_model_that_is_best_in_it():
    _, asked = played(Leads(0.85, 0.5))
    assert share(asked, quarter=3) > 0.9


@by_night
def test_of_models_that_are_good_on_disjoint_halves_each_is_asked_in_its_own():
    _, asked = played(Leads(0.85, 0.2, changes=True))
    assert share(asked, quarter=1) > 0.7
    assert share(asked, quarter=3) > 0.7


def test_a_useless_model_is_seldom_asked_and_never_left_out_for_good():
    beside, noted = played(Leads(0.8, 0.5), (USELESS, *KINDS))
    asked = sum(count for key, count in noted.items() if USELESS in key)
    assert 0 < asked < 0.05 * noted.total()
    assert beside.speed > 1.5


def priced(names: Sequence[str]) -> TargetModel:
    """A target whose models take 4 ms for the first text and 0.4 ms for each further one."""
    times = [(count, 0.0036 + 0.0004 * count) for count in (1, 4)]
    return TargetModel(
        None,
        [DraftTime(count, 8, name, False, time_s) for name in names for count, time_s in times],
    )


def told(outcomes: Sequence[int], names: Sequence[str] = KINDS) -> Text:
    """A text in which each model has brought that much."""
    text = text_of("r")
    text.names = tuple(names)
    for name, accepted in zip(names, outcomes, strict=True):
        for place in range(0, 40, 4):
            text.standing.note(name, place, accepted)
    return text


@pytest.mark.parametrize(
    ("rate", "value", "num_models"), [(1500.0, None, 1), (50.0, None, 3), (50.0, 0.4, 1)]
)
def test_texts_share_a_model_where_one_for_each_does_not_pay(
    rate: float, value: float | None, num_models: int
):
    """value: of all their trees, where that is known; the texts themselves promise ten times it."""
    residents = [Resident(name, False) for name in KINDS]
    texts = [told(each) for each in ((3, 1, 1), (1, 3, 1), (1, 1, 3), (3, 1, 2))]
    ensemble = Ensemble(priced(KINDS), AcceptanceModel(), residents, rate)
    teams = ensemble.teams(texts, np.ones(len(texts)), value)
    assert all(teams)
    assert len({*teams}) == num_models


def test_a_model_that_drafts_for_other_texts_is_tried_sooner(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        "cluster.plan.ensemble._HOPEFUL_SHARE", 1.0
    )  # as much as the best is enough
    residents = [Resident(name, False) for name in "ab"]
    ensemble = Ensemble(priced(("a", "b")), AcceptanceModel(), residents, 100.0)
    texts = [told((3, 0), ("a", "b")), told((0, 3), ("a", "b"))]
    for asked, affordable_s, tried in (
        (["a", "a"], 1.0, ["a", "a"]),
        (["a", "b"], 0.0003, ["ab", "b"]),
        (["a", "b"], 1.0, ["ab", "ab"]),
    ):
        for each in texts:
            each.standing.turns.update({name: Exploration(0.0, num_done=1) for name in "ab"})
        teams = [*map(frozenset, asked)]
        spent_s = ensemble.add_tries(texts, teams, 0.1, affordable_s)
        assert teams == [*map(frozenset, tried)]
        before_s, after_s = (ensemble.draft_s(each, 0.0) for each in (asked, teams))
        assert spent_s == pytest.approx((after_s - before_s)[SIZES.index(FIRST_NODES)])


@pytest.mark.parametrize(("read_s", "asked"), [(0.1, "a"), (1.0, "b")])
def test_a_better_model_is_to_bring_the_time_in_which_it_reads_the_text(read_s: float, asked: str):
    text, target = told((3, 1), ("a", "b")), TargetModel(None)
    residents = [Resident(name, False) for name in "ab"]
    text.take_ask(Ask(8), frozenset("b"), residents)
    for name in "ab":
        target.drafting[name].read_s = read_s
    other = text_of("names none of them")
    ensemble = Ensemble(target, AcceptanceModel(), residents, 100.0)
    assert ensemble.teams([text, other], np.ones(2)) == [{asked}, frozenset()]


def test_a_model_that_was_never_asked_or_is_new_has_not_read_even_a_short_text():
    text, model = told((1,), ("a",)), Resident("a", False)
    assert not text.is_read("a")
    text.take_ask(Ask(8), frozenset("a"), [model])
    assert text.is_read("a")
    assert text.standing.expected("a", 40, 3.0) < 2.0
    text.weights["a"] = 1.0
    text.forget("a")
    assert not text.is_read("a")
    assert not text.weights
    assert text.standing.expected("a", 40, 3.0) == 3.0, "another model is there now"


def test_a_shadow_is_tried_and_never_preferred():
    target, acceptance = TargetModel(None), AcceptanceModel()
    text = told((1, 3), ("old", "new"))
    old, new = Resident("old", False), Resident("new", False)
    text.shadows = frozenset({"new"})
    for residents, team in (((old, new), {"old"}), ((new,), {"new"})):
        ensemble = Ensemble(target, acceptance, residents, 1.0)
        assert ensemble.teams([text], np.ones(1)) == [team]
    teams = [frozenset({"old"})]
    Ensemble(target, acceptance, (old, new), 1.0).add_tries([text], teams, 0.0, 1.0)
    assert teams == [{"old", "new"}]


@pytest.mark.parametrize("deep_first", [True, False])
def test_outcomes_that_are_known_late_are_compared_by_their_place(deep_first: bool):
    """The outcome of a tree of four is known three tokens later than that of a single node."""
    scores = DraftScores()
    text = text_of("r")
    sizes = {"deep": 4, "flat": 1}
    for _ in range(12):
        for name in sorted(sizes, reverse=not deep_first):
            tree = TokenTree.chain([1] * sizes[name])
            claimed = np.full(len(tree), 0.9, np.float32)
            text.seen.append(Seen(name, GROUP, len(text.tokens), tree, claimed))
        for token in (1, 1, 1, 1, 9):
            text.tokens.append(token_array([token]))
            scores.score([text])
    assert text.standing.expected("deep", len(text.tokens), 1.0) > 3.0
    assert text.standing.expected("flat", len(text.tokens), 1.0) < 1.1
    chain, sure = TokenTree.chain([1, 1]), np.ones(2, np.float32)
    text.seen.append(Seen("late", GROUP, len(text.tokens), chain, sure))
    text.tokens.append(token_array([1]))
    for ends in (False, True):
        scores.score([text], ends=ends)
        assert len(text.seen) + ends == 1


def test_what_is_known_of_other_texts_counts_as_two_places_and_what_is_old_for_less():
    standing = Standing()
    assert standing.expected("a", 0, 1.5) == 1.5
    for place, accepted in ((5, 3), (20, 1)):
        standing.note("a", place, accepted)
    for now in (20, 160, 2000):
        kept = 0.995 ** np.array([now - 5, now - 20])
        expected = (2.0 * 1.5 + kept @ [3.0, 1.0]) / (2.0 + kept.sum())
        assert standing.expected("a", now, 1.5) == pytest.approx(expected)
    assert standing.expected("a", 4, 1.5) == standing.expected("a", 20, 1.5)


def test_where_a_drafter_fails_of_a_sudden_the_text_counts_as_a_new_one():
    standing, places = Standing(), iter(range(0, 150, 3))
    for place in itertools.islice(places, 30):
        standing.note("a", place, 2)
        standing.note("b", place, 0)
    standing.turns["a"] = Exploration()
    while standing.turns:
        standing.note("a", place := next(places), 0)
    assert place == 105, "the sixth time"
    assert standing.expected("b", 150, 1.5) == standing.expected("a", 150, 1.5) == 1.5
