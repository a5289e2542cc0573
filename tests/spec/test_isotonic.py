"""Pooling adjacent violators against the definition."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.evidence import isotonic

pairs = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=5)


def loss(found: list[float], values: list[int], weights: list[int]) -> float:
    return sum(w * (x - v) ** 2 for x, v, w in zip(found, values, weights, strict=True))


@given(pairs)
def test_nothing_in_order_is_nearer(given_pairs: list[tuple[int, int]]) -> None:
    values, weights = [pair[0] for pair in given_pairs], [pair[1] for pair in given_pairs]
    found = isotonic(values, weights)
    assert found == sorted(found)
    others = itertools.combinations_with_replacement(
        [0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0], len(values)
    )
    assert all(
        loss(found, values, weights) <= loss(list(o), values, weights) + 1e-9 for o in others
    )


def test_what_is_in_order_stays_and_what_is_not_is_pooled_by_weight() -> None:
    assert isotonic([1.0, 2.0, 2.0], [1.0, 1.0, 1.0]) == [1.0, 2.0, 2.0]
    assert isotonic([4.0, 1.0, 9.0], [1.0, 2.0, 1.0]) == pytest.approx([2.0, 2.0, 9.0])
    assert isotonic([], []) == []


def test_pools_are_pooled_again_with_all_of_their_weight() -> None:
    assert isotonic([3.0, 5.0, 1.0], [1.0, 1.0, 4.0]) == pytest.approx([2.0] * 3)
    assert isotonic([1.0, 6.0, 3.0, 4.0], [1.0, 1.0, 2.0, 1.0]) == pytest.approx([1.0, 4, 4, 4])
    with pytest.raises(ValueError, match="zip"):
        isotonic([1.0], [])
