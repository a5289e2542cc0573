"""Trees that native code scores in a batch are worth what they are one by one."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.core import FloatArray, TokenTree, token_array
from cluster.spec.acceptance import AcceptanceModel
from cluster.spec.native.trees import Fate, Seen
from cluster.spec.step_profile import DRAFT_LENGTHS
from tests.support.spec import in_loops
from tests.support.spec.trees import random_tree


def claims(tree: TokenTree, generator: np.random.Generator) -> FloatArray:
    """Claims of zero and of certainty are among them, and equal ones."""
    found: list[float] = []
    for parent in tree.parents.tolist():
        found.append((found[parent] if parent >= 0 else 1.0) * generator.choice([0, 0.3, 0.7, 1]))
    return np.array(found, dtype=np.float32)


def test_scores_and_calibration_equal_those_of_the_reference() -> None:
    generator = np.random.default_rng(5)
    fast, slow = AcceptanceModel(), AcceptanceModel()
    steps = [np.zeros(len(DRAFT_LENGTHS), dtype=np.int64) for _ in range(2)]
    place = 0
    for turn in range(600):
        tree = random_tree(generator, 4, int(generator.integers(0, 14)))
        group, claimed = (f"t{turn % 3}", turn % 5 == 0), claims(tree, generator)
        seen = Seen(f"d{turn % 2}", group, place, tree, claimed)
        length = int(generator.integers(0, max(seen.depth, 1) + 1))
        followed = token_array(generator.integers(0, 4, length).tolist())
        own, other = steps if turn % 4 else (None, None)
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


def test_a_batch_counts_each_of_its_trees_in_turn() -> None:
    """The second tree stands where the step of the first one would have gone already."""
    tree, claimed = TokenTree.chain([1, 2]), np.array([0.9, 0.8], dtype=np.float32)
    next_steps = np.zeros(len(DRAFT_LENGTHS), dtype=np.int64)
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
