"""Claims become calibrated by what is revealed, and by nothing else."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import TokenTree
from cluster.spec import survival as survival_
from cluster.spec.evidence import isotonic
from cluster.spec.survival import Calibrator, claimed_conditionals, sigmoid
from cluster.spec.tree import monotone
from tests.support.spec.in_loops import calibrated, observe, survival
from tests.support.spec.trees import token_trees


def test_claimed_conditionals_invert_the_product_along_paths():
    parents = np.array([-1, 0, 0, 1], np.int32)

    claims = claimed_conditionals(parents, np.array([0.8, 0.4, 0.2, 0.0], np.float32))

    assert claims.tolist() == pytest.approx([0.8, 0.5, 0.25, 0.0])


def test_an_untrained_calibrator_believes_the_claims():
    claims = np.array([0.1, 0.5, 0.9])

    np.testing.assert_allclose(calibrated(Calibrator(), claims), claims, rtol=1e-9)
    assert Calibrator().expected_error() == 0.0


@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans()), min_size=32, max_size=200),
    st.integers(1, 40),
)
def test_whatever_was_observed_a_higher_claim_never_counts_for_less(
    seen: list[tuple[float, bool]], size: int
):
    calibrator = Calibrator()
    for start in range(0, len(seen), size):
        claims, outcomes = zip(*seen[start : start + size], strict=True)
        observe(calibrator, np.array(claims), np.array(outcomes))

    found = calibrated(calibrator, np.linspace(0.0, 1.0, 501))

    assert (np.diff(found) >= -1e-12).all()
    assert (found > 0.0).all()
    assert (found < 1.0).all()
    assert 0.0 <= calibrator.expected_error() <= 1.0


def test_claims_that_nobody_makes_any_more_do_not_turn_the_order_around():
    generator = np.random.default_rng(2)
    calibrator = Calibrator()
    observe(calibrator, np.linspace(0.01, 0.99, 200), generator.random(200) < 0.5)
    for _ in range(120):  # sixty half-lives
        observe(calibrator, np.full(1000, 0.3), generator.random(1000) < 0.2)

    found = calibrated(calibrator, np.linspace(0.0, 1.0, 501))

    assert (np.diff(found) >= -1e-12).all()
    assert float(calibrated(calibrator, 0.3)) == pytest.approx(0.2, abs=0.03)


def test_the_fit_is_the_likeliest_below_its_prior_and_each_bin_is_drawn_to_what_it_saw():
    generator, calibrator, slopes = np.random.default_rng(4), Calibrator(), []
    for _ in range(3000):
        claim = generator.random()
        observe(calibrator, claim, generator.random() < claim**2)
        slopes.append(calibrator.curve[0])
    calibrator.restore(calibrator.export())
    num, accepted, claims = np.array(calibrator.export()[:3])
    # It is fitted anew after each twentieth of what it remembers.
    assert len({*slopes[-300:]}) == 1 + 300 // math.ceil(num.sum() / 20)
    means, (slope, offset) = claims / num, calibrator.curve[:2]

    def loss(*off: float) -> float:
        found = (slope + off[0]) * means + offset + off[1]
        prior = 10.0 * ((slope + off[0] - 1.0) ** 2 + (offset + off[1]) ** 2)
        return num @ np.logaddexp(0.0, found) - accepted @ found + prior

    assert loss(0, 0) == min(itertools.starmap(loss, itertools.product((-0.02, 0, 0.02), repeat=2)))
    expected = accepted + 20.0 * sigmoid(slope * means + offset)
    rates = isotonic(expected / (num + 20.0), num + 20.0)
    assert calibrated(calibrator, sigmoid(means)) == pytest.approx(rates, abs=0.0025)


def test_the_calibration_error_is_that_of_what_was_predicted_before(
    monkeypatch: pytest.MonkeyPatch,
):
    """It tells a drafter that lies from one that does not, and a fit that fits only afterwards."""
    generator = np.random.default_rng(3)
    honest, lying, random = Calibrator(), Calibrator(), Calibrator()
    for _ in range(800):
        claims = generator.uniform(0.02, 0.98, 4)
        observe(honest, claims, generator.random(4) < claims)
        with monkeypatch.context() as held_to_the_identity:
            held_to_the_identity.setattr(survival_, "_PRIOR", 1e9)
            observe(lying, claims, generator.random(4) < claims**3)
        # All outcomes of a batch alike and unforeseeable: fitted afterwards, never foretold.
        observe(random, claims, np.full(4, generator.random() < 0.5))

    assert honest.expected_error() < 0.03
    assert lying.expected_error() > 0.15
    assert random.expected_error() < 0.1


def test_a_drafter_that_turns_bad_is_found_out_within_its_half_life():
    generator = np.random.default_rng(1)
    calibrator = Calibrator()
    for share in (0.8, 0.1):
        for _ in range(2):
            observe(calibrator, np.full(6000, 0.8), generator.random(6000) < share)

    assert calibrated(calibrator, 0.8) == pytest.approx(0.1, abs=0.08)


@given(token_trees(), st.integers(0, 99))
def test_calibrated_survival_is_a_law_over_each_nodes_children(tree: TokenTree, seed: int):
    generator = np.random.default_rng(seed)
    calibrator = Calibrator()
    observe(calibrator, np.full(100, 0.3), np.ones(100))  # claims come out higher
    observe(calibrator, np.full(100, 0.9), np.ones(100))
    claimed = monotone(tree.parents, generator.random(len(tree)).astype(np.float32))

    found = survival(calibrator, tree.parents, claimed)

    assert np.array_equal(found, monotone(tree.parents, found))
    for parent in range(-1, len(tree)):
        total = found[tree.parents == parent].sum()
        assert total <= (1.0 if parent < 0 else found[parent]) * (1 + 1e-5)


# Pooling adjacent violators against the definition.


pairs = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=5)


def loss(found: list[float], values: list[int], weights: list[int]) -> float:
    return sum(w * (x - v) ** 2 for x, v, w in zip(found, values, weights, strict=True))


@given(pairs)
def test_nothing_in_order_is_nearer(given_pairs: list[tuple[int, int]]):
    values, weights = [pair[0] for pair in given_pairs], [pair[1] for pair in given_pairs]
    found = isotonic(values, weights)
    assert found == sorted(found)
    others = itertools.combinations_with_replacement(
        [0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0], len(values)
    )
    assert all(
        loss(found, values, weights) <= loss(list(o), values, weights) + 1e-9 for o in others
    )
