"""The window of token recycling: its guesses go on as the target says."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cluster.core import EMPTY_TREE, SamplingParams, TokenTree, token_array
from cluster.draft.base import DrafterContext
from cluster.draft.inside import StepRows
from cluster.draft.token_recycling import LookaheadOptions, TokenRecyclingDrafter
from cluster.spec.noise import gumbel
from tests.support.draft.author import GREEDY, Author, write
from tests.support.draft.step_rows import step_rows
from tests.support.spec.trees import paths

HOST: Any = object()


def drafter(max_nodes: int = 12, **options: Any) -> TokenRecyclingDrafter:
    context = DrafterContext("look", max_nodes, 8, target=HOST)
    return TokenRecyclingDrafter(context, LookaheadOptions(**options))


def rows(
    text: Sequence[int], said: Sequence[int], tree: TokenTree = EMPTY_TREE, **changes: Any
) -> StepRows:
    """A step whose last context row is the end of `text`; said: the most probable token of it and
    of each node."""
    token_ids, top = [*text, *tree.token_ids.tolist()], [[token, 900, 901] for token in said]
    return step_rows(token_ids, top, tree.parents, **{"next_token": said[0], **changes})


def paths_of(tree: TokenTree) -> set[tuple[int, ...]]:
    return set(paths(tree))


def proposed(
    look: TokenRecyclingDrafter, author: Author, token_ids: Sequence[int] = ()
) -> TokenTree:
    proposal = write(look, author, token_ids)
    return EMPTY_TREE if proposal is None else proposal.tree


def test_the_window_is_a_jacobi_iteration():
    """Each next guess is what the target said at the guess before, moved on by what was drawn."""
    look, author = drafter(window=3), Author([1, 2, 3])
    first = proposed(look, author)
    assert (1, 2, 3) in paths_of(first)  # any words do to begin with
    chain = TokenTree.chain([1, 2, 3])
    look.read([rows([1, 2, 3], [10, 11, 12, 13], chain)])  # 10 is drawn: no guess was right
    second = paths_of(proposed(look, author, [10]))
    assert (11, 12, 13) in second


def test_accepted_guesses_move_the_window_on():
    look, author = drafter(window=3), Author([1, 2, 3])
    proposed(look, author)
    chain = TokenTree.chain([1, 2, 3])
    accepted = {"path": token_array([0]), "next_token": 7}
    look.read([rows([1, 2, 3], [1, 7, 8, 9], chain, **accepted)])
    assert (8, 9) in paths_of(proposed(look, author, [1, 7]))


def test_with_noise_the_guess_is_the_targets_own_draw():
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=50)
    look, author = drafter(window=1), Author([1, 2, 3], params)
    proposed(look, author)
    look.read([rows([1, 2, 3], [10, 11], TokenTree.chain([3]))])
    likely = np.array([11, 900, 901])
    scores = np.log([0.7, 0.2, 0.1]) / 1.5 + gumbel(params.noise_key, 1, likely)
    assert (int(likely[scores.argmax()]),) in paths_of(proposed(look, author, [10]))


def test_the_window_takes_at_most_half_of_the_nodes_and_chains_the_rest():
    look = drafter(max_nodes=6, window=5, min_survival=0.0001)
    for token in range(20, 30):
        look.read([rows([4, 5], [token])])
    tree = proposed(look, Author([4, 5, 4, 5], max_nodes=6))
    assert len(tree) <= 6
    assert len(paths_of(tree) & {(4,), (4, 5), (4, 5, 4)}) == 3


def test_survival_falls_along_every_path_and_is_learned():
    look, author = drafter(window=4), Author([1, 2, 3, 4])
    proposal = write(look, author, [])
    before = proposal.survival
    assert (np.diff(before) < 0).all()
    for token in range(50, 80):  # no guess is ever right
        proposal = write(look, author, [token])
    assert proposal.survival[-1] < before[-1] / 4


def test_a_request_near_its_end_gets_no_useless_guesses():
    params = replace(GREEDY, max_tokens=2)
    tree = proposed(drafter(window=4), Author([1, 2, 3, 4], params))
    assert len(tree) == 1
