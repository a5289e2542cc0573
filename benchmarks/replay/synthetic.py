"""Texts made in code: for tests of the replay, and never to be quoted as results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cluster.core import FloatArray, TokenTree
from cluster.records import frozen
from cluster.simulate.world import RecordedText, RecordedTrees

_SIZE = 12
# Kinds of texts, and the specialist of each under the same name.
KINDS = ("code", "mathematics", "letters")
# A drafter that is never right.
USELESS = "useless"
_CHANGES = " and another"  # behind the task of texts whose kind changes


@frozen
class Leads:
    """The accuracy of a specialist in texts of its own kind, and in others.

    changes: the second half of each text is of the next kind.  shares: a token that is hard for one
    is hard for all.
    """

    own: float
    others: float
    changes: bool = False
    shares: bool = True


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


def specialists(
    num_texts: int, leads: Leads, length: int = 400, prompt_len: int = 128, seed: int = 0
) -> list[RecordedText]:
    """Make greedy texts of each kind by turns, with a specialist of each and a useless drafter.

    Their claims are the same whatever the text, so nothing but outcomes tells them apart."""
    generator = np.random.default_rng(seed)
    found = []
    for number in range(num_texts):
        token_ids = generator.integers(0, 1000, length).astype(np.int32)
        task = KINDS[number % len(KINDS)] + (_CHANGES if leads.changes else "")
        text = RecordedText(prompt_len, token_ids, task, False, {})
        luck = generator.random(length + _SIZE)
        trees = {}
        for name in (*KINDS, USELESS):
            own = luck if leads.shares else generator.random(length + _SIZE)
            accuracy = np.full(length + _SIZE, leads.others if name in KINDS else 0.0)
            accuracy[:length][[kind_at(text, place) == name for place in range(length)]] = leads.own
            offers = [
                _tree(token_ids, own < accuracy, position, leads.own) for position in range(length)
            ]
            trees[name] = RecordedTrees.of(offers)
        found.append(replace(text, trees=trees))
    return found


def kind_at(text: RecordedText, position: int) -> str:
    """Return the kind of a text of `specialists` at that position."""
    kind = text.task.removesuffix(_CHANGES)
    if kind == text.task or position < len(text.token_ids) // 2:
        return kind
    return KINDS[(KINDS.index(kind) + 1) % len(KINDS)]


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
