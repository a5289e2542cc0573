"""Whose the nodes of a batch are: bits that stay with their nodes while texts go on."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from cluster.core import TokenTree, token_array
from cluster.plan.in_flight import PLAIN, gather, in_flight_of, look_at
from cluster.plan.texts import POOL, HeldTree, Text
from cluster.spec.acceptance import AcceptanceModel
from tests.support.plan.played import text_of
from tests.support.spec.trees import paths

NAMES = ("pool-a", "resident", "pool-b", "look-up")
A, RESIDENT, B, LOOK_UP = 1, 2, 4, 8


def text() -> Text:
    made = text_of("r", max_draft_tokens=64)
    made.names = NAMES
    return made


def hold(
    of: Text, name: str, tree: TokenTree, sources: Sequence[int] | None = None, **fields: bool
) -> None:
    """A tree that continues the text as it is."""
    base_len, survival = len(of.tokens), np.full(len(tree), 0.5, np.float32)
    bits = None if sources is None else np.array(sources, np.uint32)
    of.held[name] = HeldTree(base_len, base_len, tree, survival, sources=bits, **fields)


def offered(*texts: Text) -> list[dict[tuple[int, ...], int]]:
    """Of each text the bits of its nodes, by their paths."""
    offers = gather(texts, AcceptanceModel())
    if offers is None:
        return [{} for _ in texts]
    found = []
    for index, tree in enumerate(offers.forest.split()):
        bits = offers.sources[offers.forest.span(index)].tolist()
        found.append(dict(zip(paths(tree), bits, strict=True)))
    return found


def test_texts_of_one_batch_have_bits_of_their_own():
    one, other = text(), text()
    other.names = ("resident",)
    hold(one, POOL, TokenTree.chain([1, 2]), [B, B])
    hold(other, "resident", TokenTree.chain([1, 2]), is_resident=True)
    hold(other, "not named", TokenTree.chain([3]), is_resident=True)
    one.tokens.append(token_array([1]))
    assert offered(one, other) == [{(2,): B}, {(1,): 1, (1, 2): 1, (3,): 0}]


def test_what_a_text_has_left_of_a_tree_is_noted_with_all_that_is_known_of_its_nodes():
    own = text()
    hold(own, POOL, TokenTree.of([9, 1, 2], [-1, -1, 1]), [A, B, A | B])
    hold(own, "resident", TokenTree.of([1, 2, 3, 4], [-1, 0, 1, 0]), is_resident=True)
    pool, held = own.held.values()
    held.survival, held.laws = (
        np.array([0.8, 0.4, 0.2, 0.2], np.float32),
        dict(enumerate("abcde", -1)),
    )
    assert offered(own) == [{(9,): A, (1,): B | 2, (1, 2): A | B | 2, (1, 2, 3): 2, (1, 4): 2}]
    for tokens, bits, laws, survival in (
        ([1], [A | B], {-1: "b", 0: "c", 1: "d", 2: "e"}, [0.5, 0.25, 0.25]),
        ([2], [], {-1: "c", 0: "d"}, [0.5]),
    ):
        own.tokens.append(token_array(tokens))
        offered(own)
        assert held.base_len == len(own.tokens) == held.proposed_len + tokens[0]
        assert (pool.sources.tolist(), held.laws) == (bits, laws)
        for found in (held.survival, held.calibrated):
            assert found.tolist() == pytest.approx(survival, abs=0.001)
    assert (held.tree.token_ids.tolist(), held.tree.parents.tolist()) == ([3], [-1])
    own.tokens.append(token_array([7]))
    assert (offered(own), own.held) == ([{}], {})


def test_what_is_chosen_goes_into_flight_with_its_bits():
    one, other, third = text(), text(), text()
    hold(one, POOL, TokenTree.of([1, 2, 3], [-1, 0, -1]), [A, B, A | B])
    hold(third, "resident", TokenTree.chain([4]), is_resident=True)
    offers = gather([one, other, third], AcceptanceModel())
    order = paths(offers.forest.split()[0])
    chosen = np.array([order.index((1,)), order.index((1, 2)), 3])
    first, second, last = in_flight_of(offers, chosen)
    assert second is PLAIN
    assert dict(zip(paths(first.tree), first.sources.tolist(), strict=True)) == {
        (1,): A,
        (1, 2): B,
    }
    assert (last.tree.token_ids.tolist(), last.sources.tolist()) == ([4], [RESIDENT])
    assert in_flight_of(offers, chosen[:0]) == [PLAIN, PLAIN, PLAIN]


def test_nodes_of_the_pool_and_of_look_ups_are_told_apart_and_weighed_by_trust():
    own = text()
    hold(own, POOL, TokenTree.of([1, 2], [-1, -1]), [A, A])
    hold(own, "resident", TokenTree.of([2, 3], [-1, -1]), is_resident=True)
    hold(own, "look-up", TokenTree.of([3, 4], [-1, -1]), is_resident=True, is_look_up=True)
    # A drafter that has lost all trust in this text counts for a little.
    own.standing = SimpleNamespace(expected=lambda name, *_: float(name != "resident"))
    offers = gather([own], AcceptanceModel())
    tokens = offers.forest.token_ids
    assert offers.survival[tokens.argsort()] * 2.05 == pytest.approx([0.5, 0.525, 0.525, 0.5])
    assert sorted(tokens[offers.is_pooled].tolist()) == [1, 2]
    assert sorted(tokens[offers.is_looked_up].tolist()) == [3, 4]


@pytest.mark.parametrize("is_shadow", [True, False])
def test_a_shadow_is_looked_at_and_not_offered(is_shadow: bool):
    own = text()
    own.shadows = frozenset(["resident"] * is_shadow)
    hold(own, "resident", TokenTree.chain([1, 2]), is_resident=True)
    assert offered(own) == [{} if is_shadow else {(1,): RESIDENT, (1, 2): RESIDENT}]
    look_at([own], 0)
    assert [seen.drafter for seen in own.seen] == ["resident"]


def test_a_node_is_credited_to_the_heaviest_of_those_that_proposed_it():
    of = text()
    of.names = ("a", "b")
    for weights, found in (({"b": 1.0}, [0, 1, 1]), ({"a": 1.0, "b": 0.5}, [0, 0, 1])):
        of.weights = weights
        assert of.owners([0b01, 0b11, 0b10]) == found
    assert of.owners([0b100]) == [-1]
