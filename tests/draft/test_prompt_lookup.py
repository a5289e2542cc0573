"""Drafts from the request's own text, and the index that finds the places in it."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replay.along import Recording, replay
from cluster.core import SamplingParams
from cluster.draft.base import DrafterContext
from cluster.draft.indexed_text import IndexedText
from cluster.draft.suffix import PromptLookupOptions, SuffixDrafter
from tests.support.draft.author import GREEDY, Author, grow, write


def drafter(max_nodes: int = 16, **options: int) -> SuffixDrafter:
    settings = PromptLookupOptions(**{"min_ngram": 2, **options})
    return SuffixDrafter(DrafterContext("lookup", max_nodes, 8), settings)


def test_the_latest_occurrence_of_the_ngram_is_continued() -> None:
    proposal = write(drafter(max_nodes=4), Author([1, 2, 3, 4, 5, 6, 7, 2, 3]), [])
    assert proposal.tree.token_ids.tolist() == [4, 5, 6, 7]
    assert proposal.tree.parents.tolist() == [-1, 0, 1, 2]


def test_the_longer_match_wins_over_the_newer_one() -> None:
    text = [1, 2, 3, 50, 9, 9, 2, 3, 60, 9, 9, 1, 2, 3]
    proposal = write(drafter(max_nodes=2), Author(text), [])
    assert proposal.tree.token_ids[0] == 50
    assert proposal.survival[0] > proposal.survival[1]


def test_competing_continuations_become_siblings() -> None:
    text = [7, 1, 2, 50, 9, 1, 2, 60, 8, 1, 2]
    proposal = write(drafter(max_nodes=8), Author(text), [])
    roots = proposal.tree.token_ids[proposal.tree.parents == -1]
    assert set(roots.tolist()) == {50, 60}


def test_no_earlier_match_means_no_proposal() -> None:
    assert write(drafter(), Author([1, 2, 3, 4, 5]), []) is None


def test_a_loop_is_continued_beyond_the_end_of_the_text() -> None:
    proposal = write(drafter(max_nodes=9), Author([4, 5, 6] * 4), [])
    assert proposal.tree.token_ids.tolist() == [4, 5, 6] * 3


def test_outputs_that_copy_the_prompt_are_drafted_almost_completely() -> None:
    prompt = np.random.default_rng(0).integers(0, 500, 300).astype(np.int32)
    for temperature in (0.0, 1.0):
        params = dataclasses.replace(GREEDY, temperature=temperature)
        stats = replay(drafter(), Recording(prompt, prompt[:200], params), 16)
        assert stats.mean_acceptance_length > 6.0


def test_drafts_end_where_the_text_must_end() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    proposal = write(drafter(), Author(prompt, params), [])
    assert proposal.tree.token_ids.tolist() == [3, 4, 5]
    stopping = SamplingParams(temperature=0.0, max_tokens=100, stop_token_ids=(5,))
    proposal = write(drafter(), Author(prompt, stopping), [])
    assert proposal.tree.token_ids.tolist() == [3, 4]


def test_a_tree_is_proposed_once_and_again_after_a_commit() -> None:
    lookup, author = drafter(), Author([1, 2, 3, 4, 1, 2])
    assert write(lookup, author, []) is not None
    assert grow(lookup, author) == {}
    proposal = write(lookup, author, [3])
    assert (proposal.base_len, proposal.tree.token_ids[0]) == (7, 4)


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(0, 40),
    st.lists(st.integers(0, 2), max_size=20),
    st.integers(1, 4),
)
def test_the_index_after_a_rollback_equals_that_of_a_new_text(
    first: list[int], cut: int, second: list[int], size: int
) -> None:
    text = IndexedText((size,))
    text.append(first)
    cut = min(cut, len(first))
    text.truncate(cut)
    text.append(second)
    whole = first[:cut] + second
    gram = whole[-size:]
    expected = [
        end for end in range(len(whole) - 1, size - 1, -1) if whole[end - size : end] == gram
    ]
    assert text.after(size, whole, 1000) == (expected if len(whole) >= size else [])
