"""Every node counts for one drafter, so that counts by drafter add up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.credit import owners

NUM_DRAFTERS = 4
SOURCES = st.lists(st.integers(1, 2**NUM_DRAFTERS - 1), max_size=12)


@given(SOURCES, st.permutations(range(NUM_DRAFTERS)))
def test_counts_add_up_and_every_node_is_one_that_its_owner_proposed(
    sources: list[int], order: list[int]
) -> None:
    found = owners(sources, order)
    assert len(found) == len(sources)
    assert all(bits >> owner & 1 for bits, owner in zip(sources, found, strict=True))


def test_who_has_the_largest_weight_of_those_that_proposed_a_node_has_it() -> None:
    assert owners([0b01, 0b11, 0b10], [1, 0]) == [0, 1, 1]
    assert owners([0b01, 0b11, 0b10], [0, 1]) == [0, 0, 1]
    assert owners([0b100], [0, 1]) == [-1]
