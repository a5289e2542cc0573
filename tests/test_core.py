import dataclasses

import numpy as np
import pytest

from cluster.core import (
    EMPTY_TOKENS,
    EMPTY_TREE,
    SamplingParams,
    SpeculationStats,
    TokenTree,
    token_array,
)


def test_token_array_copies_only_what_it_must() -> None:
    ids = np.array([1, 2, 3], dtype=np.int32)
    assert token_array(ids) is ids
    assert token_array([1, 2, 3]).dtype == np.int32
    assert token_array(np.array([1, 2], dtype=np.int64)).dtype == np.int32
    assert token_array(np.arange(6, dtype=np.int32)[::2]).flags.c_contiguous


def test_token_array_refuses_ids_that_do_not_fit() -> None:
    with pytest.raises(OverflowError):
        token_array([2**31])


def test_the_shared_empty_arrays_cannot_be_written() -> None:
    assert not EMPTY_TOKENS.flags.writeable
    assert len(EMPTY_TREE) == 0


def test_a_chain_is_a_tree_whose_nodes_continue_each_other() -> None:
    chain = TokenTree.chain([7, 8, 9])
    assert chain.token_ids.tolist() == [7, 8, 9]
    assert chain.parents.tolist() == [-1, 0, 1]
    assert chain.parents.dtype == np.int32
    assert len(TokenTree.chain([])) == 0


def test_a_tree_can_be_written_down_as_two_lists() -> None:
    tree = TokenTree.of([5, 6, 7], [-1, -1, 0])
    assert len(tree) == 3
    assert tree.token_ids.dtype == tree.parents.dtype == np.int32


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), False),
        (SamplingParams(presence_penalty=0.1), True),
        (SamplingParams(frequency_penalty=-0.1), True),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(logit_bias=((1, 2.0),), top_k=5), False),
    ],
)
def test_penalties_are_noticed(params: SamplingParams, expected: bool) -> None:
    assert params.has_penalties is expected


def test_statistics_follow_vllms_definitions() -> None:
    stats = SpeculationStats(
        num_steps=10, num_spec_steps=4, num_draft_tokens=20, num_accepted_draft_tokens=6
    )
    assert stats.mean_acceptance_length == 1 + 6 / 4
    assert stats.draft_acceptance_rate == 6 / 20


def test_statistics_without_speculation_are_those_of_plain_decoding() -> None:
    assert SpeculationStats(num_steps=5).mean_acceptance_length == 1.0
    assert SpeculationStats(num_steps=5).draft_acceptance_rate == 0.0


def test_nouns_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().seed = 3  # type: ignore[misc]
