"""Who serves, who is scored only and who rests, and what moves a drafter from one to the other."""

import json
import logging
from collections.abc import Iterator

import numpy as np
import pytest

from cluster.config.schema import Config, DrafterConfig
from cluster.config.speculation import RolloutConfig
from cluster.core import EMPTY_FLOATS, EMPTY_TREE, Proposal, TokenTree, token_array
from cluster.plan.roster import DraftScores, Roster, lot_of
from cluster.plan.texts import HeldTree, Resident, Text
from cluster.spec.budget import Ask
from cluster.spec.token_log import TokenLog
from cluster.spec.trials import NOTHING, Candidate, Phase, Stretch, Trial, moments
from tests.support.plan.played import text_of

SHARE = 0.5


def text(lot: float = 0.0, names: tuple[str, ...] = ("old", "new", "other")) -> Text:
    made = text_of("r")
    made.names, made.lot = names, lot
    return made


def config(share: float = SHARE) -> Config:
    """With a rollout, unless its share is 0."""
    rollout = RolloutConfig("old", share) if share else None
    return Config(drafters={"new": DrafterConfig(kind="suffix", rollout=rollout)})


def roster() -> Roster:
    made = Roster(config(), ("old", "new"))
    made.met("old", "")
    made.met("new", "one")
    return made


def learned(phase: str, places: int = 0, lead: float = 0.0) -> dict[str, object]:
    """What a candidate has exported."""
    return {"phase": phase, "places": places, "lead": [lead] * len(moments(NOTHING))}


def candidate(phase: str = "shadow") -> Candidate:
    made = Candidate("new", max_faults=3)
    made.restore(learned(phase))
    return made


def stretches(lead: float, seed: int = 0) -> Iterator[tuple[int, Stretch]]:
    """Ten places each, at which the former has one right token and the candidate more or fewer."""
    generator = np.random.default_rng(seed)
    while True:
        yield 10, (10.0, 10.0 * (1.0 + lead) + generator.normal(), 10.0, 10.0 + generator.normal())


def entered(one: Candidate, lead: float, most: int, error: float = 0.0) -> tuple[Phase, int]:
    """Enter places until the phase changes; returns it with the number of places so far."""
    former, num_places = one.phase, 0
    for count, stretch in stretches(lead):
        if num_places + count > most:
            break
        num_places += count
        one.enter(count, stretch, error)
        if one.phase is not former:
            break
    return one.phase, num_places


def test_a_better_one_rises_twice_and_needs_its_places_each_time():
    one = candidate()
    assert entered(one, 0.2, 10_000) == (Phase.CANARY, 500)
    assert entered(one, 0.2, 10_000) == (Phase.ACTIVE, 500)
    assert entered(one, 0.2, 10_000) == (Phase.ACTIVE, 10_000)


def test_one_that_is_not_better_never_rises():
    assert entered(candidate(), 0.0, 20_000) == (Phase.SHADOW, 20_000)


def test_one_whose_claims_are_untrue_waits():
    one = candidate()
    assert entered(one, 0.5, 2_000, error=0.06)[0] is Phase.SHADOW
    assert entered(one, 0.5, 10, error=0.04)[0] is Phase.CANARY


@pytest.mark.parametrize("num_phases", [1, 2])
def test_one_that_turns_bad_is_out_within_300_places_and_stays_so(num_phases: int):
    one = candidate()
    for _ in range(num_phases):
        entered(one, 0.3, 10_000)
    entered(one, 0.3, 400)
    phase, num_places = entered(one, -1.0, 1_000)
    assert phase is Phase.RETIRED
    assert num_places <= 300
    assert entered(one, 1.0, 5_000) == (Phase.RETIRED, 5_000)


def test_one_that_serves_is_not_brought_down_by_chance():
    one = candidate("active")
    assert entered(one, 0.05, 10_000)[0] is Phase.ACTIVE


@pytest.mark.parametrize(
    ("phase", "num_faults", "ends_in"),
    [
        ("shadow", 10, "shadow"),
        ("canary", 2, "canary"),
        ("canary", 3, "retired"),
        ("active", 99, "active"),
    ],
)
def test_faults_bring_down_a_canary_alone(phase: str, num_faults: int, ends_in: str):
    one = candidate(phase)
    for _ in range(num_faults):
        one.note_faults(1)
    assert one.phase == ends_in


def roles(own: Roster, one: Text) -> tuple[str, str]:
    """What the candidate and the former are in a text."""
    own.assign(one)
    assert not {"other"} & (one.shadows | one.resting)
    known = ("shadow", one.shadows), ("rests", one.resting)
    new, old = (
        next((role for role, names in known if name in names), "serves") for name in ("new", "old")
    )
    return new, old


@pytest.mark.parametrize(
    ("phase", "in_sample", "elsewhere"),
    [
        ("shadow", ("shadow", "serves"), ("rests", "serves")),
        ("canary", ("serves", "shadow"), ("rests", "serves")),
        ("active", ("serves", "shadow"), ("serves", "rests")),
        ("retired", ("rests", "serves"), ("rests", "serves")),
    ],
)
def test_roles_in_each_phase(phase: str, in_sample: tuple[str, str], elsewhere: tuple[str, str]):
    own = roster()
    own.restore({"new@one": learned(phase)})
    assert roles(own, text(0.49)) == in_sample
    assert roles(own, text(0.5)) == elsewhere


def test_one_that_is_configured_as_a_shadow_is_one_in_every_text():
    shadow = DrafterConfig(kind="suffix", shadow=True)
    assert roles(Roster(Config(drafters={"new": shadow})), text(0.9)) == ("shadow", "serves")


def active() -> Roster:
    own = roster()
    own.restore({"new@one": learned("active", 7, 1.0)})
    return own


def test_the_former_serves_where_the_candidate_cannot():
    own, bound = active(), text(0.9)
    assert roles(own, bound) == ("serves", "rests")
    bound.is_coupled = False  # such a text would not be the same with another drafter
    assert roles(own, bound) == ("rests", "serves")
    assert roles(own, text(0.9, names=("old",)))[1] == "serves"
    own.left("new")
    assert roles(own, text(0.9))[1] == "serves"


def test_other_weights_begin_anew_and_the_same_ones_go_on():
    own = active()
    told = text()
    own.follow([told])
    own.met("new", "two")
    told.held["new"] = told.held["other"] = HeldTree(1, 1, EMPTY_TREE, EMPTY_FLOATS)
    for _ in range(2):
        own.follow([told])
        assert (told.shadows, [*told.held]) == ({"new"}, ["other"])
    assert roles(own, text())[0] == "shadow"
    own.met("new", "one")
    assert roles(own, text(0.9))[0] == "serves"
    assert own.table()[0]["places"] == 7


def test_what_is_known_outlives_a_restart_and_a_change_of_settings():
    state = json.loads(json.dumps(active().export()))
    own = Roster(config(), ("old", "new"))
    own.restore(state)
    own.met("new", "one")
    assert roles(own, text(0.9))[0] == "serves"
    own.use(config(0.0), ("old", "new"))
    assert roles(own, text(0.9)) == ("serves", "serves")
    own.use(config(0.2), ("old", "new"))
    assert roles(own, text(0.9))[1] == "rests"
    assert Roster(config(), ()).table() == []
    own.met("new", "two")
    with pytest.raises(ValueError, match="another form"):
        own.restore({"new@two": {"phase": "active", "places": 1, "lead": [0.0]}})
    assert roles(own, text(0.9))[0] == "rests"


def test_lots_are_even_and_the_same_everywhere():
    lots = [lot_of(f"r{number}") for number in range(4000)]
    assert np.histogram(lots, 10, (0.0, 1.0))[0] == pytest.approx([400] * 10, abs=80)
    assert lot_of("r1") == lots[1]


def proposal(base_len: int, *tokens: int) -> Proposal:
    survival = np.full(len(tokens), 0.9, np.float32)
    return Proposal("r", 1, base_len, 0, TokenTree.chain(tokens), survival)


def test_a_trial_counts_the_steps_of_each_and_a_silent_drafter_has_none_right():
    tokens, trial = TokenLog(token_array([0] * 5)), Trial(("new", "old"), "shadow")
    for base_len in (1, 2, 3):
        trial.keep("new", proposal(base_len, 0, 0))
    trial.keep("old", proposal(2, 9))
    trial.keep("old", proposal(2, 0))  # the newest tree of a place counts
    trial.keep("new", proposal(5, 7))  # nothing has followed it
    ((num_places, stretch),) = trial.take_due(tokens, ends=True)
    # A step with the new one from 1 ends at 4; with the old one steps begin at 1, 2 and 4.
    assert (num_places, stretch) == (3, (1.0, 2.0, 2.0, 1.0))
    assert not [*trial.take_due(tokens, ends=True)]


def step(scores: DraftScores, one: Text) -> None:
    """Three tokens, of which the candidate has drafted two and the former one."""
    for name, drafts in (("new", (1, 1)), ("old", (1, 2))):
        scores.keep_newest(one, name, proposal(len(one.tokens), *drafts))
    one.tokens.append(token_array([1, 1, 1]))


def test_places_before_a_change_of_phase_are_no_evidence_of_the_phase_behind_it(
    caplog: pytest.LogCaptureFixture,
):
    """Each text holds some back; of many texts at once these were enough for the next step up."""
    scores = DraftScores(roster())
    texts = [text() for _ in range(60)]
    num_steps = 0
    caplog.set_level(logging.INFO, logger="cluster.spec.trials")
    scores.roster.follow(texts)
    while roles(scores.roster, texts[0])[1] == "serves":
        num_steps += 1
        for one in texts:
            step(scores, one)
        scores.score(texts)
    assert num_steps < 40
    scores.score(texts, ends=True)
    (row,) = scores.roster.table()
    assert (row["phase"], row["places"]) == ("canary", 0)
    (said,) = caplog.messages
    assert said.startswith("rollout name=new replaces=old phase=canary former=shadow places=5")
    assert "it leads by 1.000 tokens a step" in said


def test_only_new_faults_count_and_another_process_counts_from_zero():
    own = roster()
    own.note_faults({"new": {"link": 40}})
    own.restore({"new@one": learned("canary")})
    for _ in range(2):
        own.note_faults({"new": {"link": 42}})
    assert own.table()[0]["phase"] == "canary"
    own.note_faults({"new": {"link": 1}})
    assert own.table()[0]["phase"] == "retired"


def test_a_candidate_drafts_beside_the_one_that_it_is_compared_with():
    residents = (Resident("old", False), Resident("new", False), Resident("other", True))
    own, inside, outside = roster(), text(), text(0.9)
    for one in (inside, outside):
        own.assign(one)
        one.take_ask(Ask(4), frozenset(("old", "other")), residents)
    assert inside.asked == {"old", "new", "other"}
    assert (outside.asked, outside.resting) == ({"old", "other"}, {"new"})
    assert [each.pair for each in own.trials(inside)] == [("new", "old")]
    inside.take_ask(Ask(4, with_models=False), frozenset({"other"}), residents)
    assert (inside.asked, [*own.trials(inside)]) == ({"other"}, [])
