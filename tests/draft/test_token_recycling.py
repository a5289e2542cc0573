"""What a step thought likely is drafted again after the same words, within tenant and task; and the
window of guesses goes on as the target says."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.core import EMPTY_TREE, SamplingParams, TokenTree, token_array
from cluster.draft.base import DrafterContext
from cluster.draft.inside import StepRows
from cluster.draft.token_recycling import (
    LookaheadOptions,
    TokenRecyclingDrafter,
    TokenRecyclingOptions,
)
from cluster.spec.noise import gumbel
from tests.support.draft.author import GREEDY, Author, write
from tests.support.draft.step_rows import step_rows
from tests.support.spec.trees import paths


def made(options: Any, max_nodes: int = 12) -> TokenRecyclingDrafter:
    context = DrafterContext("recycling", max_nodes, 8, target=object())
    return TokenRecyclingDrafter(context, options)


def drafter(**options: Any) -> TokenRecyclingDrafter:
    return made(TokenRecyclingOptions(num_top=3, **options))


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


def tree_of(
    recycling: TokenRecyclingDrafter, author: Author, token_ids: Sequence[int] = ()
) -> dict[tuple[int, ...], float]:
    """Paths of the proposal and their survival."""
    proposal = write(recycling, author, token_ids)
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


# The window.


def verified(
    text: Sequence[int], said: Sequence[int], tree: TokenTree = EMPTY_TREE, **changes: Any
) -> StepRows:
    """A step whose last context row is the end of `text`; said: the most probable token of it and
    of each node."""
    token_ids, top = [*text, *tree.token_ids.tolist()], [[token, 900, 901] for token in said]
    return step_rows(token_ids, top, tree.parents, **{"next_token": said[0], **changes})


def test_the_window_is_a_jacobi_iteration():
    """Each next guess is what the target said at the guess before, moved on by what was drawn."""
    look, author = made(LookaheadOptions(window=3)), Author([1, 2, 3])
    assert (1, 2, 3) in tree_of(look, author)  # any words do to begin with
    chain = TokenTree.chain([1, 2, 3])
    look.read([verified([1, 2, 3], [10, 11, 12, 13], chain)])  # 10 is drawn: no guess was right
    assert (11, 12, 13) in tree_of(look, author, [10])


def test_accepted_guesses_move_the_window_on():
    look, author = made(LookaheadOptions(window=3)), Author([1, 2, 3])
    write(look, author, [])
    chain = TokenTree.chain([1, 2, 3])
    accepted = {"path": token_array([0]), "next_token": 7}
    look.read([verified([1, 2, 3], [1, 7, 8, 9], chain, **accepted)])
    assert (8, 9) in tree_of(look, author, [1, 7])


def test_with_noise_the_guess_is_the_targets_own_draw():
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=50)
    look, author = made(LookaheadOptions(window=1)), Author([1, 2, 3], params)
    write(look, author, [])
    look.read([verified([1, 2, 3], [10, 11], TokenTree.chain([3]))])
    likely = np.array([11, 900, 901])
    scores = np.log([0.7, 0.2, 0.1]) / 1.5 + gumbel(params.noise_key, 1, likely)
    assert (int(likely[scores.argmax()]),) in tree_of(look, author, [10])


def test_the_window_takes_at_most_half_of_the_nodes_and_chains_the_rest():
    look = made(LookaheadOptions(window=5, min_survival=0.0001), max_nodes=6)
    for token in range(20, 30):
        look.read([verified([4, 5], [token])])
    tree = tree_of(look, Author([4, 5, 4, 5], max_nodes=6))
    assert len(tree) <= 6
    assert len(tree.keys() & {(4,), (4, 5), (4, 5, 4)}) == 3


def test_survival_falls_along_every_path_and_is_learned():
    look, author = made(LookaheadOptions(window=4)), Author([1, 2, 3, 4])
    proposal = write(look, author, [])
    before = proposal.survival
    assert (np.diff(before) < 0).all()
    for token in range(50, 80):  # no guess is ever right
        proposal = write(look, author, [token])
    assert proposal.survival[-1] < before[-1] / 4


def test_a_request_near_its_end_gets_no_useless_guesses():
    params = replace(GREEDY, max_tokens=2)
    assert len(tree_of(made(LookaheadOptions(window=4)), Author([1, 2, 3, 4], params))) == 1
