"""Trees that are no trees are told from those that are, at once and one by one alike."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import EMPTY_FLOATS, EMPTY_TREE, FloatArray, Proposal, TokenTree
from cluster.errors import ProtocolError
from cluster.spec import tree_check
from cluster.spec.tree import monotone
from cluster.spec.tree_check import (
    ANY_VOCABULARY,
    MAX_PROPOSED_NODES,
    are_sound,
    check_tree,
    problem_of_tree,
    problems_of_proposals,
)
from tests.support.spec.trees import token_trees

VOCAB_SIZE = 6


@pytest.mark.parametrize(
    ("tokens", "parents", "named"),
    [
        ([1, 2], [-1], "2 token ids and 1 parents"),
        ([1, 2], [-1, 1], "node 1 has parent 1"),
        ([1, 2], [1, -1], "node 0 has parent 1"),
        ([1], [-2], "parent -2"),
        ([1, 10], [-1, 0], "token 10"),
        ([-1], [-1], "token -1"),
        ([3, 4, 3], [-1, -1, -1], "node 2 repeats token 3"),
        ([3, 4, 4], [-1, 0, 0], "under 0"),
    ],
)
def test_a_malformed_tree_is_refused_with_the_value(
    tokens: list[int], parents: list[int], named: str
):
    with pytest.raises(ProtocolError, match=named):
        check_tree(TokenTree.of(tokens, parents), vocab_size=10)


@pytest.mark.parametrize(
    ("survival", "named"),
    [
        ([0.5, float("nan")], "node 1 has survival nan"),
        ([float("inf"), 0.5], "node 0 has survival inf"),
        ([-0.1, 0.0], "node 0 has survival -0.1"),
        ([1.5, 0.5], "node 0 has survival 1.5"),
        ([0.4, 0.5], "above 0.4"),
        ([0.5], "2 nodes and 1 survival"),
    ],
)
def test_survivals_that_are_none_are_refused_with_the_value(survival: list[float], named: str):
    problem = problem_of_tree(TokenTree.chain([1, 2]), np.array(survival, np.float32), 10)

    assert named in problem


def test_what_rounding_does_to_survivals_is_no_fault():
    survival = np.array([1.0000002, 1.0000004, 0.3, 0.30000004, 0.0, 5e-7], np.float32)

    assert problem_of_tree(TokenTree.chain([1, 2, 3, 4, 5, 6]), survival, 10) is None


@pytest.mark.parametrize("wrong", [np.int64, np.uint32, np.float64, np.object_, np.bool_])
def test_numbers_of_another_type_are_refused(wrong: type):
    tree = TokenTree.chain([1, 0])
    survival = np.ones(2, np.float32)

    for field in ("token_ids", "parents"):
        other = replace(tree, **{field: getattr(tree, field).astype(wrong)})
        assert "int32" in str(problem_of_tree(other, None, 10))
        assert not are_sound([other], [survival], 10)
    assert "float32" in str(problem_of_tree(tree, survival.astype(wrong), 10))


def test_arrays_of_more_dimensions_and_what_is_no_array_are_refused():
    square = np.zeros((2, 2), np.int32)

    for other in (square, np.int32(1), [1, 2], None, "12"):
        assert problem_of_tree(TokenTree(other, other), None, 10) is not None  # type: ignore[arg-type]
        assert not are_sound([TokenTree(other, other)], [EMPTY_FLOATS], 10)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"request_id": 5}, "strings"),
        ({"base_len": -1}, "base_len"),
        ({"base_len": "7"}, "base_len"),
        ({"generation": None}, "generation"),
        ({"prefix_hash": 1 << 64}, "prefix_hash"),
        ({"tree": None}, "no TokenTree"),
        ({"survival": None}, "float32"),
        ({"survival": EMPTY_FLOATS}, "0 survival values"),
        ({"tree": TokenTree.chain(range(5000))}, "5000 nodes"),
    ],
)
def test_a_proposal_of_anything_is_refused_with_a_reason(change: dict[str, object], named: str):
    proposal = Proposal("r", 1, 3, 9, TokenTree.chain([1, 2]), np.ones(2, np.float32), "d")
    other = replace(proposal, **change)
    if len(getattr(other.tree, "token_ids", ())) > MAX_PROPOSED_NODES:
        other = replace(other, survival=np.ones(5000, np.float32))

    found = problems_of_proposals([proposal, other, "not even one"], 10)  # type: ignore[list-item]

    assert found[0] is None
    assert named in str(found[1])
    assert "a str is no Proposal" in str(found[2])


@st.composite
def spoiled_trees(draw: st.DrawFn) -> tuple[TokenTree, FloatArray]:
    """Trees of which some are spoiled in one place."""
    tree = draw(token_trees(VOCAB_SIZE))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    survival = monotone(tree.parents, generator.random(len(tree)).astype(np.float32))
    if len(tree) == 0 or not draw(st.booleans()):
        return tree, survival
    node = draw(st.integers(0, len(tree) - 1))
    tokens, parents = tree.token_ids.copy(), tree.parents.copy()
    match draw(st.integers(0, 2)):
        case 0:
            tokens[node] = draw(st.integers(-1, VOCAB_SIZE) | st.just(-(2**31)))
        case 1:
            parents[node] = draw(st.integers(-2, len(tree)) | st.just(2**31 - 1))
        case _:
            survival[node] = draw(st.floats(-0.5, 1.5, width=32) | st.just(float("nan")))
    return TokenTree(tokens, parents), survival


@given(st.lists(spoiled_trees(), max_size=4), st.sampled_from([VOCAB_SIZE, ANY_VOCABULARY]))
def test_trees_are_sound_together_when_each_one_is(
    spoiled: list[tuple[TokenTree, FloatArray]], vocab_size: int
):
    problems = [problem_of_tree(tree, values, vocab_size) for tree, values in spoiled]
    assert any(problems) != are_sound(
        [tree for tree, _ in spoiled], [values for _, values in spoiled], vocab_size
    )


def test_without_a_compiler_the_answer_is_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tree_check.native, "is_available", lambda: False)
    cycle = TokenTree.of([1, 2], [1, 0])
    survivals = [EMPTY_FLOATS, np.ones(2, np.float32)]

    assert are_sound([EMPTY_TREE, TokenTree.chain([1, 2])], survivals, VOCAB_SIZE)
    assert not are_sound([EMPTY_TREE, cycle], survivals, VOCAB_SIZE)
