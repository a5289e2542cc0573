"""Drafts from the request's own text, and the index that finds the places in it."""

from __future__ import annotations

import pytest

from cluster.core import EMPTY_TREE, SamplingParams
from cluster.draft.base import DrafterContext
from cluster.draft.suffix import PromptLookupOptions, SuffixDrafter
from tests.support.draft.author import GREEDY, Author, grow, write


def drafter(max_nodes: int = 16, **options: int) -> SuffixDrafter:
    settings = PromptLookupOptions(**{"min_ngram": 2, **options})
    return SuffixDrafter(DrafterContext("lookup", max_nodes, 8), settings)


ENDING = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "max_nodes", "params", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 2, 3], 4, GREEDY, [4, 5, 6, 7]),  # behind the latest occurrence
        ([1, 2, 3, 4, 5], 16, GREEDY, []),
        ([4, 5, 6] * 4, 9, GREEDY, [4, 5, 6] * 3),  # beyond the end of the text
        (ENDING, 16, SamplingParams(temperature=0.0, max_tokens=4), [3, 4, 5]),
        (ENDING, 16, SamplingParams(temperature=0.0, stop_token_ids=(5,)), [3, 4]),
    ],
)
def test_the_text_goes_on_as_before_as_far_as_it_may(
    prompt: list[int], max_nodes: int, params: SamplingParams, drafts: list[int]
) -> None:
    proposal = write(drafter(max_nodes), Author(prompt, params), [])
    tree = EMPTY_TREE if proposal is None else proposal.tree
    assert tree.token_ids.tolist() == drafts
    assert tree.parents.tolist() == list(range(-1, len(drafts) - 1))


def test_a_tree_is_proposed_once_and_again_after_a_commit() -> None:
    lookup, author = drafter(), Author([1, 2, 3, 4, 1, 2])
    assert write(lookup, author, []) is not None
    assert grow(lookup, author) == {}
    proposal = write(lookup, author, [3])
    assert (proposal.base_len, proposal.tree.token_ids[0]) == (7, 4)
