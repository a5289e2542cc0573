"""Every node counts for one drafter, so that counts by drafter add up."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cluster.spec.credit import credited, is_proposed, owners
from cluster.spec.forest import Mask

MASKS = arrays.arrays(np.bool_, st.tuples(st.integers(1, 5), st.integers(0, 12)))


@given(MASKS)
def test_counts_add_up_and_what_is_left_is_shared(proposed: Mask) -> None:
    proposed = proposed[:, proposed.any(axis=0)]  # every node has somebody
    own, shared = credited(proposed)
    assert sum(own) == proposed.shape[1]
    assert [a + b for a, b in zip(own, shared, strict=True)] == proposed.sum(axis=1).tolist()
    assert all(proposed[owner, node] for node, owner in enumerate(owners(proposed).tolist()))


def test_the_first_who_proposed_a_node_has_it() -> None:
    claimed = np.array([[np.nan, 0.5, 0.4], [0.9, 0.8, np.nan]], np.float32)
    assert owners(is_proposed(claimed)).tolist() == [1, 0, 0]
    assert credited(is_proposed(claimed)) == ([2, 1], [0, 1])
