"""Random trees for the tests of this package and of the verifier."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from cluster.core import TokenArray, TokenTree


def path_to(parents: TokenArray, node: int) -> list[int]:
    """The nodes from a child of the context down to `node`, which is the last; -1 gives []."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    path.reverse()
    return path


@st.composite
def token_trees(draw: st.DrawFn, vocab_size: int = 6, max_nodes: int = 12) -> TokenTree:
    """A well-formed tree of any shape; few tokens, so that paths coincide often."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(-1, node - 1))
        token = draw(st.integers(0, vocab_size - 1))
        if (parent, token) in zip(parents, tokens, strict=True):
            continue  # parents refer to nodes before this one, which stay what they are
        parents.append(min(parent, len(tokens) - 1))
        tokens.append(token)
    return dedup(tokens, parents)


def dedup(tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    """The tree without the nodes that repeat a sibling's token, nor what hangs from them."""
    kept: list[int] = []
    place: dict[int, int] = {-1: -1}
    edges: set[tuple[int, int]] = set()
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent in place and (place[parent], token) not in edges:
            edges.add((place[parent], token))
            place[node] = len(kept)
            kept.append(node)
    return TokenTree.of([tokens[i] for i in kept], [place[parents[i]] for i in kept])


def random_tree(generator: np.random.Generator, vocab_size: int, num_nodes: int) -> TokenTree:
    """About `num_nodes` nodes of random shape."""
    parents = [int(generator.integers(-1, node)) if node else -1 for node in range(num_nodes)]
    return dedup(generator.integers(0, vocab_size, num_nodes).tolist(), parents)


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """The token path to every node, in node order: a tree as a set of strings."""
    return [
        tuple(int(tree.token_ids[i]) for i in path_to(tree.parents, node))
        for node in range(len(tree))
    ]
