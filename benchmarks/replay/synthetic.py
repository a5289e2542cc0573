"""Texts made in code: for tests of the replay, and never to be quoted as results."""

from __future__ import annotations

import numpy as np

from cluster.core import FloatArray, TokenTree
from cluster.simulate.texts import RecordedText, RecordedTrees

_SIZE = 12


def texts(
    num_texts: int, length: int, agreement: float, seed: int = 0, drafter: str = "lm"
) -> list[RecordedText]:
    """Make texts, half of them greedy and half sampled, with one drafter of a given accuracy.

    Its trees are chains with a side node at each node; its claims are too great by a fifth.
    """
    generator = np.random.default_rng(seed)
    found = []
    for number in range(num_texts):
        token_ids = generator.integers(0, 1000, length).astype(np.int32)
        is_right = generator.random(length + _SIZE) < agreement
        offers = [_tree(token_ids, is_right, position, agreement) for position in range(length)]
        trees = {drafter: RecordedTrees.of(offers)}
        found.append(RecordedText(8, token_ids, "default", number % 2 == 1, trees))
    return found


def _tree(
    token_ids: np.ndarray, is_right: np.ndarray, position: int, agreement: float
) -> tuple[TokenTree, FloatArray]:
    tokens: list[int] = []
    parents: list[int] = []
    survival: list[float] = []
    claim, trunk = min(1.2 * agreement, 0.95), -1
    for depth in range(_SIZE // 2):
        at = position + depth
        true = int(token_ids[at]) if at < len(token_ids) else 1001
        above = 1.0 if trunk < 0 else survival[trunk]
        tokens += [true if is_right[at] else 2000 + at, 3000 + at]
        parents += [trunk, trunk]
        survival += [above * claim, above * 0.5 * (1.0 - claim)]
        trunk = len(tokens) - 2
    return TokenTree.of(tokens, parents), np.array(survival, dtype=np.float32)
