import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import (
    EMPTY_TOKENS,
    EMPTY_TREE,
    SamplingParams,
    SpeculationStats,
    TokenTree,
    VerifyItem,
    prefix_hash,
    token_array,
)

# Other languages implement poly64 from the wire contract; these vectors are what they test against.
PREFIX_HASH_VECTORS = [
    ([], 0x0000000000000000),
    ([0], 0x0000000000000001),
    ([1, 2, 3], 0x992EC7721A7027B5),
    ([4095, 0, 17], 0xE109A69E04E60C27),
    ([2**31 - 1], 0x0000000080000000),
    (list(range(1000)), 0x7D2152B65922DE44),
]

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=50)


@pytest.mark.parametrize(("token_ids", "expected"), PREFIX_HASH_VECTORS)
def test_prefix_hash_gives_the_committed_vectors(token_ids: list[int], expected: int) -> None:
    assert prefix_hash(token_ids) == expected
    assert prefix_hash(token_array(token_ids)) == expected


@given(tokens, tokens)
def test_prefix_hash_can_be_continued(before: list[int], after: list[int]) -> None:
    assert prefix_hash(after, prefix_hash(before)) == prefix_hash(before + after)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50), st.data())
def test_prefix_hash_sees_every_position(token_ids: list[int], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(token_ids) - 1))
    changed = [*token_ids]
    changed[index] ^= 1
    assert prefix_hash(changed) != prefix_hash(token_ids)
    assert prefix_hash(token_ids[:-1]) != prefix_hash(token_ids)


@given(tokens)
def test_prefix_hash_fits_in_64_bits(token_ids: list[int]) -> None:
    assert 0 <= prefix_hash(token_ids) < 2**64


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
    assert TokenTree.empty() is EMPTY_TREE


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


def test_an_items_context_is_what_the_target_holds_and_what_it_is_sent() -> None:
    item = VerifyItem(
        request_id="r",
        generation=0,
        base_len=10,
        prefix_hash=0,
        delta=token_array([1, 2, 3]),
        tree=EMPTY_TREE,
        prompt_len=8,
    )
    assert item.context_len == 13


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
