"""A drafter that was never verified is known by the texts that its trees were held against."""

import json
from dataclasses import replace

import numpy as np
import pytest

from cluster.core import FloatArray, SamplingParams, TokenTree, token_array
from cluster.requests.fields import Law
from cluster.spec import acceptance
from cluster.spec.acceptance import AcceptanceModel, Score, group_of
from cluster.spec.native.trees import Fate, Seen
from cluster.spec.step_profile import DRAFT_LENGTHS
from tests.support.spec import in_loops
from tests.support.spec.in_loops import calibrated, first_steps, survival
from tests.support.spec.trees import random_tree

GROUP = ("code", False)
FORK = TokenTree.of([5, 6, 7, 8], [-1, 0, 0, -1])  # 5 -> 6 or 7, or 8
CLAIMED = np.array([0.8, 0.6, 0.1, 0.15], np.float32)


def fate(*followed: int, drafter: str = "lm") -> Fate:
    """A fork in a text, and what has followed it."""
    return Fate(Seen(drafter, GROUP, 0, FORK, CLAIMED), token_array(followed), first_steps())


@pytest.mark.parametrize(
    ("adapter", "law", "temperature", "name"),
    [
        ("", "coupled", 0.0, "code"),
        ("sql", "coupled", 0.7, "code@sql"),
        ("", "rejection", 0.7, "code/rejection"),
    ],
)
def test_texts_of_one_task_adapter_and_law_are_one_group(
    adapter: str, law: Law, temperature: float, name: str
):
    params = SamplingParams(temperature=temperature, law=law)
    assert group_of(params, "code", adapter) == (name, temperature > 0.0)


def accepted(score: Score, rank: int) -> float:
    return score.expected(DRAFT_LENGTHS.tolist().index(rank))[0]


def test_accepted_are_the_best_nodes_that_the_text_went_through():
    model = AcceptanceModel()
    model.learn([fate(5, 7, 9)])
    score = model.score("lm", GROUP)
    # In the order of claims: 5, 6, 8, 7.
    assert [accepted(score, rank) for rank in (1, 2, 3, 4, 32)] == [1.0, 1.0, 1.0, 2.0, 2.0]
    model.learn([fate(9, 9)])
    assert accepted(score, 1) == pytest.approx(0.5, abs=0.01)
    _, error = score.expected(0)
    assert 0.2 < error < 0.5
    assert score.num_trees == pytest.approx(2.0, abs=0.01)


def test_only_nodes_of_known_fate_are_held_against_their_claims():
    model = AcceptanceModel()
    model.learn([fate(5)])  # what follows 5 is not known
    score = model.score("lm", GROUP)
    assert sum(score.calibrator.export()[0]) == pytest.approx(2.0)
    model.learn([fate(5, 6)])
    assert sum(score.calibrator.export()[0]) == pytest.approx(6.0, abs=0.05)


def test_a_score_predicts_what_verification_brings():
    """A chain of which each token is right four times in five, never verified."""
    generator = np.random.default_rng(1)
    model = AcceptanceModel()
    chain = TokenTree.chain([1, 1, 1, 1])
    claimed = np.array([0.95, 0.9, 0.85, 0.8], np.float32)
    for _ in range(3000):
        text = (generator.random(4) > 0.8).astype(np.int32) + 1
        model.learn([Fate(Seen("lm", GROUP, 0, chain, claimed), text, first_steps())])
    expected = sum(0.8**depth for depth in range(1, 5))
    found = model.score("lm", GROUP)
    assert accepted(found, 4) == pytest.approx(expected, rel=0.05)
    survivals = survival(found.calibrator, chain.parents, claimed)
    assert survivals.sum() == pytest.approx(expected, rel=0.05)
    assert found.calibrator.expected_error() < 0.05


def test_who_brings_more_weighs_more_where_trees_are_merged():
    model = AcceptanceModel()
    good, bad = (model.score(name, GROUP) for name in ("good", "bad"))
    assert good.weight() == bad.weight()
    for _ in range(50):
        model.learn([fate(5, 6, drafter="good"), fate(9, 9, drafter="bad")])
    assert good.weight() > 4.0 * bad.weight() > 0.0


def test_what_was_learned_outlives_a_restart():
    model = AcceptanceModel()
    for _ in range(100):
        model.learn([fate(5, 7)])
    again = AcceptanceModel()
    again.restore(json.loads(json.dumps(model.export())))
    assert again.table() == model.table()
    former, restored = model.score("lm", GROUP), again.score("lm", GROUP)
    assert restored.weight() == former.weight()
    assert model.calibration_error("lm") == former.calibrator.expected_error() > 0.0
    of_all, greedy = again.known("lm", ("poems", True)), again.known("lm", ("poems", False))
    assert (of_all.num_trees, greedy.num_trees) == (0.0, former.num_trees)
    assert calibrated(restored.calibrator, [0.8]) == pytest.approx(
        calibrated(former.calibrator, [0.8]), abs=0.02
    )


def test_a_record_of_another_form_is_refused():
    state = Score().export()
    for broken in ({**state, "sums": [[1.0]]}, {**state, "calibrator": [[0.0]]}):
        with pytest.raises(ValueError, match="another form"):
            Score().restore(broken)


def test_the_table_says_of_whom_what_task_and_law_it_speaks():
    model = AcceptanceModel()
    for is_sampled in (False, True):
        own = fate(5, 7, 9)
        own = replace(own, seen=replace(own.seen, group=("code", is_sampled)))
        model.learn([own] * (20 if is_sampled else 1))
    greedy, sampled = model.table()
    assert greedy == {
        "drafter": "lm",
        "version": "lm",
        "task": "code",
        "law": "greedy",
        "trees": 1.0,
        "accepted": {str(each): 2.0 if each > 3 else 1.0 for each in DRAFT_LENGTHS.tolist()},
        "error": 0.0,
        "calibration_error": model.score("lm", GROUP).calibrator.expected_error(),
    }
    assert sampled["law"] == "sampled"
    # Of one tree nothing is known yet.
    assert model.calibration_error("lm") == sampled["calibration_error"]
    assert sampled["calibration_error"] > 0.0


def test_of_too_many_tasks_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acceptance, "_MAX_SCORES", 3)
    model = AcceptanceModel()
    for task in ("code", None, "poems", "prose"):
        model.score("lm", (task, False))
    assert [task for _, task, *_ in model.export()] == [None, "poems", "prose"]


def test_the_table_is_json_where_no_step_would_have_begun_at_a_tree():
    model = AcceptanceModel()
    model.learn([replace(fate(5, 7), next_steps=first_steps() + 1)])
    (row,) = model.table()
    assert row["error"] is None
    json.dumps(row, allow_nan=False)


def test_a_drafter_with_another_model_begins_anew_and_the_former_score_comes_back():
    model = AcceptanceModel()

    def trees() -> float:
        return model.score("a", GROUP).num_trees

    assert model.meet("a", "1" * 64)
    model.learn([fate(5, 6, drafter="a")])
    assert not model.meet("a", "1" * 64)
    assert trees() == 1.0
    assert model.meet("a", "2" * 64)
    assert trees() == model.known("a", GROUP).num_trees == 0.0
    assert model.table() == []
    restored = AcceptanceModel()
    restored.restore(json.loads(json.dumps(model.export())))
    for each in (model, restored):
        each.meet("a", "1" * 64)
        assert [row["version"] for row in each.table()] == ["a@111111111111"]
        assert [(name, score.num_trees) for name, _, score in each] == [("a", 1.0)]


# Trees that native code scores in a batch are worth what they are one by one.


def claims(tree: TokenTree, generator: np.random.Generator) -> FloatArray:
    """Claims of zero and of certainty are among them, and equal ones."""
    found = []
    for parent in tree.parents.tolist():
        found.append((found[parent] if parent >= 0 else 1.0) * generator.choice([0, 0.3, 0.7, 1]))
    return np.array(found, np.float32)


def test_scores_and_calibration_equal_those_of_the_reference():
    generator = np.random.default_rng(5)
    fast, slow = AcceptanceModel(), AcceptanceModel()
    steps = [first_steps() for _ in range(2)]
    place = 0
    for turn in range(600):
        tree = random_tree(generator, 4, int(generator.integers(0, 14)))
        group, claimed = (f"t{turn % 3}", turn % 5 == 0), claims(tree, generator)
        seen = Seen(f"d{turn % 2}", group, place, tree, claimed)
        length = int(generator.integers(0, max(seen.depth, 1) + 1))
        followed = token_array(generator.integers(0, 4, length).tolist())
        own, other = steps if turn % 4 else (first_steps(), first_steps())
        found = fast.learn([Fate(seen, followed, own)])
        assert [in_loops.learn(slow, Fate(seen, followed, other))] == found
        place += int(generator.integers(1, 3))
    assert steps[0].tolist() == steps[1].tolist()
    assert [each[:2] for each in fast] == [each[:2] for each in slow]
    for (_, _, score), (_, _, reference) in zip(fast, slow, strict=True):
        np.testing.assert_allclose(score.sums, reference.sums)
        np.testing.assert_allclose(score.calibrator.sums, reference.calibrator.sums, atol=1e-9)
        np.testing.assert_allclose(
            score.calibrator.curve, reference.calibrator.curve, rtol=1e-5, atol=1e-7
        )


def test_a_batch_counts_each_of_its_trees_in_turn():
    """The second tree stands where the step of the first one would have gone already."""
    tree, claimed = TokenTree.chain([1, 2]), np.array([0.9, 0.8], np.float32)
    next_steps = first_steps()
    model = AcceptanceModel()
    model.learn(
        [
            Fate(Seen("lm", ("t", False), start, tree, claimed), token_array([1, 2]), next_steps)
            for start in (10, 11)
        ]
    )
    score = model.score("lm", ("t", False))
    assert score.num_trees == pytest.approx(2.0, abs=0.01)
    # By its best node a step from 10 ends at 12; by both at 13: the second tree begins neither.
    assert next_steps.tolist()[:2] == [12, 13]
    assert score.sums[1:3].tolist() == pytest.approx([1.0, 1.0], abs=0.01)  # places, by length
