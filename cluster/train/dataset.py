"""Token streams, and the fixed order in which training reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from cluster.errors import ConfigError
from cluster.train.tokenizer import END_OF_TEXT

_ENCODE_BATCH = 256

Tokens = NDArray[np.uint16]


def encode_documents(texts: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> Tokens:
    """All texts concatenated, each followed by the end-of-text token."""
    end_id = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    pieces, waiting = [np.zeros(0, np.uint16)], list(texts)
    for start in range(0, len(waiting), _ENCODE_BATCH):
        for encoding in tokenizer.backend_tokenizer.encode_batch(
            waiting[start : start + _ENCODE_BATCH], add_special_tokens=False
        ):
            pieces.append(np.array([*encoding.ids, end_id], dtype=np.uint16))
    return np.concatenate(pieces)


@dataclass(frozen=True, slots=True)
class WindowOrder:
    """Windows of `length` + 1 tokens over several streams, in an order fixed by the seed.

    Windows overlap by one token, so that each token of an epoch is predicted once.  Every epoch
    shifts and shuffles the windows again.  The order depends only on the seed, so a resumed run
    needs only the number of windows it has read.
    """

    streams: Sequence[Tokens]
    length: int
    seed: int

    def __post_init__(self) -> None:
        if all(len(stream) <= self.length + 1 for stream in self.streams):
            raise ConfigError(f"every stream is shorter than one window of {self.length} tokens")

    def windows_per_epoch(self) -> int:
        return len(self._cuts(0))

    def read(self, first: int, count: int) -> torch.Tensor:
        """Windows `first` to `first + count` of the endless order: int64[count, length + 1]."""
        rows: list[NDArray[np.int64]] = []
        per_epoch = self.windows_per_epoch()
        while len(rows) < count:
            epoch, index = divmod(first + len(rows), per_epoch)
            cuts = self._cuts(epoch)
            for stream_index, start in cuts[index : index + count - len(rows)]:
                window = self.streams[stream_index][start : start + self.length + 1]
                rows.append(np.asarray(window, dtype=np.int64))
        return torch.from_numpy(np.stack(rows))

    def _cuts(self, epoch: int) -> NDArray[np.int64]:
        """int64[n, 2]: stream index and start of each window of an epoch, shuffled."""
        generator = np.random.default_rng((self.seed, self.length, epoch))
        shift = int(generator.integers(self.length))
        parts: list[NDArray[np.int64]] = []
        for index, stream in enumerate(self.streams):
            # One window fewer than fits, so that the number of windows is the same for every shift.
            num_windows = max(0, (len(stream) - 1) // self.length - 1)
            starts = shift + self.length * np.arange(num_windows, dtype=np.int64)
            parts.append(np.stack([np.full_like(starts, index), starts], axis=1))
        cuts = np.concatenate(parts)
        generator.shuffle(cuts)
        return cuts
