"""Token streams on disk, and the fixed order in which training reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cluster.errors import ConfigError
from cluster.train.conversations import conversations
from cluster.train.corpus import KINDS, Corpus, Document
from cluster.train.tokenizer import END_OF_TEXT, save_tokenizer

CHAT_SHARE = 0.04
STREAMS = (*KINDS, "chat")
_ENCODE_BATCH = 256

Tokens = NDArray[np.uint16]
# Stream names and weights; weight 2 reads a stream twice per epoch, 0.5 only its first half.
Mixture = Sequence[tuple[str, float]]


def encode_documents(texts: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> Tokens:
    """All texts concatenated, each followed by the end-of-text token."""
    end_id = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    pieces: list[Tokens] = []
    pending: list[str] = []

    def flush() -> None:
        for encoding in tokenizer.backend_tokenizer.encode_batch(pending, add_special_tokens=False):
            pieces.append(np.array([*encoding.ids, end_id], dtype=np.uint16))
        pending.clear()

    for text in texts:
        pending.append(text)
        if len(pending) == _ENCODE_BATCH:
            flush()
    flush()
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint16)


def write_streams(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, folder: Path, seed: int
) -> dict[str, int]:
    """Encode the training part into one file per stream; returns their numbers of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    num_chars = sum(len(document.text) for document in corpus.train)
    texts: dict[str, Iterable[str]] = {
        kind: _shuffled_texts([item for item in corpus.train if item.kind == kind], seed)
        for kind in KINDS
    }
    texts["chat"] = conversations(corpus.train, seed, round(CHAT_SHARE * num_chars))
    sizes: dict[str, int] = {}
    for name in STREAMS:
        tokens = encode_documents(texts[name], tokenizer)
        np.save(folder / f"{name}.npy", tokens)
        sizes[name] = len(tokens)
    save_tokenizer(tokenizer, folder / "tokenizer")
    (folder / "sizes.json").write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")
    return sizes


def read_streams(folder: Path, names: Sequence[str] = STREAMS) -> list[Tokens]:
    """The streams that `write_streams` wrote, memory-mapped."""
    missing = [name for name in names if not (folder / f"{name}.npy").exists()]
    if missing:
        raise ConfigError(f"{folder}: no {missing[0]}.npy; run `drafthouse train tokenizer` first")
    return [np.load(folder / f"{name}.npy", mmap_mode="r") for name in names]


def mix_streams(folder: Path, mixture: Mixture) -> list[Tokens]:
    """Repeat each stream by its weight; a fraction is taken from its beginning."""
    mixed: list[Tokens] = []
    for name, weight in mixture:
        (stream,) = read_streams(folder, [name])
        mixed.extend([stream] * int(weight))
        rest = round(len(stream) * (weight - int(weight)))
        if rest:
            mixed.append(stream[:rest])
    return mixed


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in the folder of the streams or of a model."""
    inner = folder / "tokenizer"
    if not (inner / "tokenizer.json").exists() and not (folder / "tokenizer.json").exists():
        raise ConfigError(f"{folder}: no tokenizer here; run `drafthouse train tokenizer` first")
    tokenizer = AutoTokenizer.from_pretrained(inner if inner.exists() else folder)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"{folder}: expected a fast tokenizer, found {type(tokenizer).__name__}")
    return tokenizer


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


def _shuffled_texts(documents: list[Document], seed: int) -> list[str]:
    order = np.random.default_rng(seed).permutation(len(documents))
    return [documents[int(index)].text for index in order]
