"""Recorded texts: what a target wrote, and the tree that each drafter had at every place of it.

The text does not depend on the drafts, so one recording serves for every change of the loop that
decides about them.  A file is one compressed npz archive without pickled objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.core import FloatArray, TokenArray, TokenTree
from cluster.records import record
from cluster.spec.forest import concatenated, join

# A file with another version has another form.
_FORMAT = 1
# Of `RecordedTrees`, beside the survivals.
_COLUMNS = ("offsets", "token_ids", "parents")


@record
class RecordedTrees:
    """One drafter's trees along one text.

    offsets: int64[positions + 1], where the nodes of each position's tree begin.
    token_ids, parents: int32[nodes], parents within their own tree.  survival: float32[nodes].
    """

    offsets: npt.NDArray[np.int64]
    token_ids: TokenArray
    parents: TokenArray
    survival: FloatArray

    def at(self, position: int) -> tuple[TokenTree, FloatArray]:
        """Return the tree after the prompt and `position` output tokens, and its claims."""
        nodes = slice(int(self.offsets[position]), int(self.offsets[position + 1]))
        tree = TokenTree(self.token_ids[nodes], self.parents[nodes])
        return tree, self.survival[nodes]

    @classmethod
    def of(cls, trees: Sequence[tuple[TokenTree, FloatArray]]) -> RecordedTrees:
        """The trees of positions 0, 1, 2 ..."""
        forest = join([tree for tree, _ in trees])
        parents = np.maximum(forest.parents - forest.starts[forest.owners], -1).astype(np.int32)
        survival = concatenated([survival for _, survival in trees])
        return cls(forest.starts, forest.token_ids, parents, survival)


@record
class RecordedText:
    """One output of the target.

    token_ids: int32[n], the output.  trees: by drafter, for positions 0 to n - 1.
    """

    prompt_len: int
    token_ids: TokenArray
    task: str
    is_sampled: bool
    trees: Mapping[str, RecordedTrees]


def save(path: Path, texts: Sequence[RecordedText], about: Mapping[str, object]) -> None:
    """Write `texts`; about: how they were recorded, for whoever reads the file later."""
    drafters = sorted(texts[0].trees) if texts else []
    header = {
        "format": _FORMAT,
        "about": dict(about),
        "drafters": drafters,
        "texts": [[text.prompt_len, text.task, text.is_sampled] for text in texts],
    }
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    }
    for index, text in enumerate(texts):
        arrays[f"{index}.text"] = text.token_ids
        for number, name in enumerate(drafters):
            for column in _COLUMNS:
                arrays[f"{index}.{number}.{column}"] = getattr(text.trees[name], column)
            # Survivals are estimates: three digits say all there is to them.
            arrays[f"{index}.{number}.survival"] = text.trees[name].survival.astype(np.float16)
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load(path: Path) -> list[RecordedText]:
    """The texts of a file; ValueError for one of another form."""
    with np.load(path, allow_pickle=False) as arrays:
        header = json.loads(arrays["header"].tobytes())
        if header.get("format") != _FORMAT:
            raise ValueError(f"{path}: format {header.get('format')}; record it anew")
        texts = []
        for index, (prompt_len, task, is_sampled) in enumerate(header["texts"]):
            trees = {
                name: RecordedTrees(
                    **{column: arrays[f"{index}.{number}.{column}"] for column in _COLUMNS},
                    survival=arrays[f"{index}.{number}.survival"].astype(np.float32),
                )
                for number, name in enumerate(header["drafters"])
            }
            token_ids = arrays[f"{index}.text"]
            texts.append(RecordedText(prompt_len, token_ids, task, is_sampled, trees))
    return texts
