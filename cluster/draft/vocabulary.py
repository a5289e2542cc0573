"""The reduced vocabulary of a draft model: which of the target's tokens it can write, and how it
reads the others.

A draft model with few output tokens is small and fast, and hardly worse: most of a text consists of
few tokens.  Its folder holds an ordinary model whose ids are the draft vocabulary's, and
FILE_NAME with

    d2t                 int64[draft vocabulary]: target id = draft id + d2t[draft id], as in the
                        public EAGLE-3 checkpoints
    nearest             int32[target's vocabulary]: the draft id that stands for each target id in
                        the model's input; for a token of the draft vocabulary its own

and the target's tokenizer hash, since the folder needs no tokenizer of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.core import TokenArray
from cluster.draft.base import DrafterContext
from cluster.errors import ConfigError
from cluster.records import record

FILE_NAME = "draft_vocabulary.safetensors"
_HASH_KEY = "tokenizer_hash"

Ids = npt.NDArray[np.int64]


@record
class DraftVocabulary:
    """target_ids: int32[draft vocabulary].  draft_ids: int32[target's vocabulary], what
    the model reads in place of each token.  tokenizer_hash: the target's, "" = unknown."""

    target_ids: TokenArray
    draft_ids: TokenArray
    tokenizer_hash: str = ""

    def __post_init__(self) -> None:
        size = len(self.target_ids)
        if size == 0 or self.target_ids.min() < 0:
            raise ConfigError("d2t: the draft vocabulary has no target ids, or some below 0")
        if (last := self.target_ids.max()) >= len(self.draft_ids):
            raise ConfigError(f"d2t: target id {last} is beyond the target's {len(self.draft_ids)}")
        if self.draft_ids.min() < 0 or self.draft_ids.max() >= size:
            raise ConfigError(f"nearest: an id is outside the draft vocabulary 0..{size - 1}")
        if not np.array_equal(self.draft_ids[self.target_ids], np.arange(size)):
            raise ConfigError("nearest: a token of the draft vocabulary is read as another one")

    @property
    def address(self) -> int:
        """Of `target_ids`, for native code; valid as long as this object lives."""
        return self.target_ids.ctypes.data

    def read(self, target_ids: TokenArray) -> TokenArray:
        """The draft ids that the model reads in place of the target's tokens.

        A token beyond its vocabulary, for which nothing is drafted, is read as the last one."""
        return self.draft_ids[target_ids.clip(0, len(self.draft_ids) - 1)]

    def draft_id_of(self, target_id: int) -> int | None:
        """The draft id by which the model writes a token, None if it cannot."""
        if not 0 <= target_id < len(self.draft_ids):
            return None
        draft_id = int(self.draft_ids[target_id])
        return draft_id if self.target_ids[draft_id] == target_id else None

    def save(self, folder: Path) -> None:
        from safetensors.numpy import save_file

        offsets = self.target_ids.astype(np.int64) - np.arange(len(self.target_ids))
        arrays = {"d2t": offsets, "nearest": self.draft_ids}
        save_file(arrays, folder / FILE_NAME, {_HASH_KEY: self.tokenizer_hash})


def load_draft_vocabulary(folder: Path) -> DraftVocabulary | None:
    """The folder's draft vocabulary; None where the model has the target's own."""
    from safetensors import SafetensorError, safe_open

    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            offsets, nearest = file.get_tensor("d2t"), file.get_tensor("nearest")
            tokenizer_hash = (file.metadata() or {}).get(_HASH_KEY, "")
        target_ids = offsets.astype(np.int64) + np.arange(len(offsets))
        return DraftVocabulary(
            np.ascontiguousarray(target_ids, np.int32),
            np.ascontiguousarray(nearest, np.int32),
            tokenizer_hash,
        )
    except (OSError, SafetensorError, ConfigError) as error:
        raise ConfigError(f"{path}: not a draft vocabulary: {error}") from error


def written_vocabulary(target_ids: Ids, vocab_size: int) -> DraftVocabulary | None:
    """The draft vocabulary of a head; None where it is the target's own.

    target_ids: the target's token of each output of the head.  vocab_size: the target's; a head
    reads all of its tokens.
    """
    size = len(target_ids)
    if size == vocab_size and np.array_equal(target_ids, np.arange(size)):
        return None
    written, places = target_ids.astype(np.int32), np.zeros(vocab_size, np.int32)
    places[written] = np.arange(size)
    return DraftVocabulary(written, places)


def readable_vocabulary(
    context: DrafterContext, model_hash: str, model_size: int, reduced: DraftVocabulary | None
) -> tuple[str, int]:
    """The tokenizer hash and the number of the target's tokens that a draft model reads.

    model_hash, model_size: of the model's own tokenizer and vocabulary.  Raises ConfigError for a
    model whose token ids differ in meaning from the target's.  Hashes are compared first: models
    pad their vocabularies, and vocabularies of equal size may differ.
    """
    problem, remedy = "", "use a draft model with the target's tokenizer"
    theirs, ours, size = context.tokenizer_hash, model_hash, model_size
    if reduced is not None:
        ours, size = reduced.tokenizer_hash, len(reduced.draft_ids)
        if len(reduced.target_ids) != model_size:
            problem = f"{FILE_NAME} has {len(reduced.target_ids)} tokens, its model {model_size}"
            remedy = "they belong to different models"
    if not problem and theirs and ours:
        if theirs != ours:
            problem = f"tokenizer has hash {ours}, the target's {theirs}"
        size = min(context.vocab_size or size, size)
    elif not problem and context.vocab_size not in (0, size):
        problem = f"vocabulary has {size} tokens, the target's {context.vocab_size}"
    if problem:
        name = f"drafters.{context.name}"
        raise ConfigError(f"{name}: its {problem}; {remedy}", param=f"{name}.options.engine.model")
    return ours, size
