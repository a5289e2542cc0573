"""A drafter with a tokenizer of its own: the target's answers in its tokens, and its first weights.

The answers are read as they will be read in serving: the prompt is encoded as a whole, then each
token of the answer by itself, as the drafter's token with the same bytes or as several.  So behind
each of the target's tokens the drafter may learn the target's law, as far as it has these tokens.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from cluster.core import EMPTY_TOKENS, TokenArray, token_array
from cluster.draft.vocabulary import DraftVocabulary
from cluster.models.made_for import MadeFor, write_made_for
from cluster.text.tokenizer import Tokenizer
from cluster.train.chat_drafter import DraftModelLearner, save_network
from cluster.train.generate import Answer


class Rereading:
    """The target's text in the tokens of `drafter`, a tokenizer."""

    def __init__(self, target: Tokenizer, drafter: Tokenizer, target_size: int) -> None:
        """target_size: of the target's embedding, which may have rows without a token."""
        self._target = target
        self.drafter = drafter
        self._target_size = target_size
        self._texts: dict[str, TokenArray] = {}

    @classmethod
    def load(cls, target: Path, drafter: Path, network: PreTrainedModel) -> Rereading:
        """Of the tokenizers in two folders.  network: the target."""
        size = network.get_input_embeddings().num_embeddings
        return cls(Tokenizer.load(target), Tokenizer.load(drafter), size)

    @cached_property
    def draft_ids(self) -> TokenArray:
        """int32[target's vocabulary]: the drafter's token of the same bytes, -1 where it has none.
        Special tokens of the same name are the same, and so are all ends of a text."""
        drafter = self.drafter
        # Of equal ones the lowest counts.
        ordinary = {
            drafter.token_bytes(each): each
            for each in reversed(range(drafter.vocab_size))
            if each not in drafter.special_ids
        }
        special = {drafter.backend.id_to_token(each): each for each in drafter.special_ids}
        found = np.full(self._target_size, -1, np.int32)
        for token_id in range(self._target.vocab_size):
            if token_id in self._target.eos_token_ids and drafter.eos_token_ids:
                found[token_id] = drafter.eos_token_ids[0]
            elif token_id in self._target.special_ids:
                name = self._target.backend.id_to_token(token_id)
                found[token_id] = special.get(name, -1)
            else:
                found[token_id] = ordinary.get(self._target.token_bytes(token_id), -1)
        return found

    def __call__(self, answer: Answer) -> Answer:
        """The answer in the drafter's tokens.

        Its laws are the target's, by the drafter's tokens: a candidate that it lacks has no
        probability, and no law is known between the tokens that stand for one of the target's.
        """
        answered: list[int] = []
        rows: list[int] = []  # the law that each of these was drawn by, -1 = none is known
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for row, token_id in enumerate(answer.token_ids.tolist()):
            is_within, _ = decoder.getstate()
            read = self._read(token_id, decoder)
            answered += read.tolist()
            rows += [-1 if is_within or place else row for place in range(len(read))]
        laws = np.array(rows, np.int64)
        ids = self.draft_ids[answer.candidates[laws]]
        is_unknown = (ids < 0) | (laws < 0)[:, None]
        return replace(
            answer,
            prompt=self.encode(answer.prompt.tolist()),
            token_ids=np.array(answered, np.int32),
            candidates=np.maximum(ids, 0),
            log_probs=np.where(is_unknown, -np.inf, answer.log_probs[laws]).astype(np.float16),
        )

    def encode(self, token_ids: Sequence[int]) -> TokenArray:
        """A text of the target's as a whole."""
        parts: list[TokenArray] = [EMPTY_TOKENS]
        for is_special, group in groupby(token_ids, self._target.special_ids.__contains__):
            if is_special:
                parts += map(self._read, group)
            else:
                data = b"".join(map(self._target.token_bytes, group))
                parts.append(self._encode(data.decode(errors="replace")))
        return np.concatenate(parts)

    def _read(self, token_id: int, decoder: codecs.IncrementalDecoder | None = None) -> TokenArray:
        """One token's; bytes that end within a character wait for the next token's."""
        decoder = decoder or codecs.getincrementaldecoder("utf-8")("replace")
        is_within, _ = decoder.getstate()
        same = self.draft_ids[token_id]
        if same >= 0 and not is_within:
            return token_array([same])
        if token_id in self._target.special_ids:
            return self._encode(self._target.backend.id_to_token(token_id))
        return self._encode(decoder.decode(self._target.token_bytes(token_id)))

    def _encode(self, text: str) -> TokenArray:
        if text not in self._texts:
            self._texts[text] = self.drafter.encode(text, add_special_tokens=False)
        return self._texts[text]

    def renamed(self, network: PreTrainedModel) -> PreTrainedModel:
        """The target with the drafter's tokens: rows of its own where they are the same, else the
        mean of the rows by which the target reads their bytes."""
        sources = [self._source(each) for each in range(self.drafter.vocab_size)]
        renamed = copy.deepcopy(network)
        renamed.resize_token_embeddings(len(sources), mean_resizing=False)
        for ours, theirs in (
            (renamed.get_input_embeddings(), network.get_input_embeddings()),
            (renamed.get_output_embeddings(), network.get_output_embeddings()),
        ):
            rows = theirs.weight.detach()
            ours.weight.data = torch.stack([rows[source].mean(dim=0) for source in sources])
        renamed.config.bos_token_id = renamed.config.pad_token_id = None
        renamed.config.eos_token_id = list(self.drafter.eos_token_ids) or None
        return renamed

    def _source(self, draft_id: int) -> TokenArray:
        """The target's tokens that a drafter's token starts from."""
        same = token_array(np.flatnonzero(self.draft_ids == draft_id))
        if len(same):
            return same[:1]
        text = self.drafter.token_bytes(draft_id).decode(errors="replace")
        found = self._target.encode(text, add_special_tokens=False)
        # Some vocabularies lack bytes.
        return found if len(found) else token_array([0])

    @property
    def vocabulary(self) -> DraftVocabulary:
        """All of the drafter's own tokens."""
        ids = np.arange(self.drafter.vocab_size, dtype=np.int32)
        return DraftVocabulary(ids, ids)


class OtherVocabularyLearner(DraftModelLearner):
    """A draft model that reads and writes tokens of its own."""

    def __init__(self, network: PreTrainedModel, reading: Rereading, weights: str) -> None:
        super().__init__(network, reading.vocabulary, weights)
        self._reading = reading

    def save(self, folder: Path, made_for: MadeFor) -> None:
        """See `Learner`: an ordinary folder of transformers with its tokenizer."""
        save_network(self.network, folder, self._weights)
        self._reading.drafter.pretrained.save_pretrained(folder)
        write_made_for(folder, made_for)
