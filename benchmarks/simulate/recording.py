"""A recording as fake devices play it: in a small vocabulary, found by a prompt's first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cluster.core import TokenArray, token_array
from cluster.simulate.texts import RecordedText, load


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Greedy texts, whose tokens are renamed 0, 1, 2 ..., so that logits are as wide as need be."""

    texts: Sequence[RecordedText]
    vocab_size: int

    @classmethod
    def read(cls, path: Path) -> Recording:
        texts = [each for each in load(path) if not each.is_sampled and len(each.token_ids) > 1]
        known = np.unique(np.concatenate([
            part for text in texts
            for part in (text.token_ids, *(trees.token_ids for trees in text.trees.values()))
        ]))  # fmt: skip
        renamed = [
            replace(
                text,
                token_ids=_places(known, text.token_ids),
                trees={
                    name: replace(trees, token_ids=_places(known, trees.token_ids))
                    for name, trees in text.trees.items()
                },
            )
            for text in texts
        ]
        return cls(renamed, max(len(known), len(texts)))

    def prompt(self, number: int) -> TokenArray:
        """Return a prompt as long as the text's own, which begins with the text's number."""
        return token_array([number] + [0] * (self.texts[number].prompt_len - 1))


def _places(known: np.ndarray, token_ids: TokenArray) -> TokenArray:
    return np.searchsorted(known, token_ids).astype(np.int32)
