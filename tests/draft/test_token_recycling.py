"""What a step thought likely is drafted again after the same words, within tenant and task."""

from collections.abc import Sequence
from typing import Any

import pytest

from cluster.draft.base import DrafterContext
from cluster.draft.inside import StepRows
from cluster.draft.token_recycling import (
    TokenRecyclingDrafter,
    TokenRecyclingOptions,
)
from tests.support.draft.author import GREEDY, Author, write
from tests.support.draft.step_rows import step_rows
from tests.support.spec.trees import paths

HOST: Any = object()
K = 3


def drafter(max_nodes: int = 12, **options: Any) -> TokenRecyclingDrafter:
    context = DrafterContext("recycling", max_nodes, 8, target=HOST)
    return TokenRecyclingDrafter(context, TokenRecyclingOptions(num_top=K, **options))


def rows(
    text: Sequence[int],
    top: Sequence[Sequence[int]],
    nodes: Sequence[int] = (),
    parents: Sequence[int] = (),
    **changes: Any,
) -> StepRows:
    """A step after `text`, whose last token is its only row of text, and its nodes."""
    where = {"first_position": len(text) - 1, **changes}
    return step_rows([text[-1], *nodes], top, parents, **where)


def tree_of(recycling: TokenRecyclingDrafter, author: Author) -> dict[tuple[int, ...], float]:
    """Paths of the proposal and their survival."""
    proposal = write(recycling, author, [])
    if proposal is None:
        return {}
    return dict(zip(paths(proposal.tree), proposal.survival.tolist(), strict=True))


def test_drafts_follow_what_was_likely_from_word_to_word():
    recycling = drafter(max_words=1, min_survival=0.001)
    recycling.read([rows([5], [[6, 20, 21], [7, 22, 23]], [6], [-1])])
    tree = tree_of(recycling, Author([4, 5]))
    assert (6, 7) in tree
    assert {(6,), (20,), (21,)} <= tree.keys()
    assert tree[(6,)] > tree[(20,)] > tree[(21,)]
    assert tree[(6, 7)] < tree[(6,)]


def test_the_word_before_a_row_comes_from_the_text_that_it_was_told():
    recycling, author = drafter(), Author([1, 2])
    write(recycling, author, [])
    recycling.read([rows([1, 2], [[9, 0, 0]])])
    recycling.read([rows([2], [[8, 0, 0]], request_id="unknown")])
    assert (9,) in tree_of(recycling, Author([1, 2], request_id="b"))
    assert (8,) in tree_of(recycling, Author([5, 2], request_id="c"))


@pytest.mark.parametrize("change", [{"tenant": b"x"}, {"task": "code"}])
def test_no_other_tenants_or_tasks_words_are_drafted(change: dict[str, Any]):
    recycling = drafter()
    recycling.read([rows([5], [[6, 7, 8]], **change)])
    assert tree_of(recycling, Author([5])) == {}
    assert tree_of(recycling, Author([5], request_id="b", **change)) != {}


def test_it_learns_how_often_it_is_right():
    recycling = drafter(max_words=1)
    recycling.read([rows([token], [[token + 1, 0, 0]]) for token in range(100, 200)])
    author = Author([100], GREEDY)
    before = tree_of(recycling, author)[(101,)]
    for token in range(101, 190):
        write(recycling, author, [token])
    other = Author([100], GREEDY, request_id="b")
    assert tree_of(recycling, other)[(101,)] > before
