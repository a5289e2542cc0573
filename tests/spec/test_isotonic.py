"""Pooling adjacent violators against the definition."""

from __future__ import annotations

import itertools

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
