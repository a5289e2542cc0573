"""A drafter with a tokenizer of its own: the target's answers in its tokens, and its first weights.

It reads the answers as it will read texts in serving (`cluster.draft.read_text`).  So behind each
of the target's tokens it may learn the target's law, as far as it has these tokens.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from cluster.draft.intersection import intersection
from cluster.draft.read_text import RewrittenText
from cluster.draft.vocabulary import DraftVocabulary
from cluster.models.fingerprint import load_pretrained_tokenizer
from cluster.models.made_for import MadeFor, write_made_for
from cluster.models.token_bytes import TokenBytes
from cluster.train.chat_drafter import DraftModelLearner, save_network
from cluster.train.generate import Answer


class Rereading:
    """Reads the target's answers in the tokens of another tokenizer."""

    def __init__(self, target: Path, drafter: Path, network: PreTrainedModel) -> None:
        """target, drafter: folders with tokenizers.  network: the target."""
        self._folder = drafter
        self._target, self.drafter = TokenBytes.load(target), TokenBytes.load(drafter)
        self.vocab_size = len(self.drafter.bytes_of)
        target_size = network.get_input_embeddings().num_embeddings
        self._shared = intersection(
            self._target, self.drafter, target_size, self.vocab_size, "text"
        )

    @property
    def vocabulary(self) -> DraftVocabulary:
        """All of the drafter's own tokens."""
        ids = np.arange(self.vocab_size, dtype=np.int32)
        return DraftVocabulary(ids, ids)

    def __call__(self, answer: Answer) -> Answer:
        """The answer in the drafter's tokens.

        Its laws are the target's, by the drafter's tokens: a candidate that it lacks has no
        probability, and no law is known between the tokens that stand for one of the target's.
        """
        text = RewrittenText(self._shared.reader)
        text.append(answer.prompt)
        prompt_len = len(text.log)
        rows: list[int] = []  # the law that each of its tokens was drawn by, -1 = none is known
        for row in range(len(answer.token_ids)):
            was_behind, before = text.is_behind, len(text.log)
            text.append(answer.token_ids[row : row + 1])
            added = len(text.log) - before
            rows += [-1 if was_behind or place else row for place in range(added)]
        laws, written = np.array(rows, np.int64), self._shared.vocabulary
        candidates = answer.candidates[laws]
        columns = written.draft_ids[candidates]
        is_known = (written.target_ids[columns] == candidates) & (laws >= 0)[:, None]
        read = self._shared.order[text.log.token_ids].astype(np.int32)
        return replace(
            answer,
            prompt=read[:prompt_len],
            token_ids=read[prompt_len:],
            candidates=self._shared.order[columns].astype(np.int32),
            log_probs=np.where(is_known, answer.log_probs[laws], -np.inf).astype(np.float16),
        )

    def renamed(self, network: PreTrainedModel) -> PreTrainedModel:
        """The target with the drafter's tokens: rows of its own where they are the same, else the
        mean of the rows by which the target reads their bytes."""
        target_ids = self._shared.vocabulary.target_ids
        sources = {
            draft_id: [target_id]
            for draft_id, target_id in zip(
                self._shared.order.tolist(), target_ids.tolist(), strict=False
            )
        }
        for draft_id, data in enumerate(self.drafter.bytes_of):
            # Some vocabularies lack bytes, and special tokens have none.
            sources.setdefault(draft_id, self._target.write(data)[0] or [0])
        renamed = copy.deepcopy(network)
        renamed.resize_token_embeddings(self.vocab_size, mean_resizing=False)
        for ours, theirs in (
            (renamed.get_input_embeddings(), network.get_input_embeddings()),
            (renamed.get_output_embeddings(), network.get_output_embeddings()),
        ):
            rows = theirs.weight.detach()
            means = [rows[sources[each]].mean(dim=0) for each in range(self.vocab_size)]
            ours.weight.data = torch.stack(means)
        renamed.config.bos_token_id = renamed.config.pad_token_id = None
        renamed.config.eos_token_id = list(self.drafter.ends) or None
        return renamed

    def save_tokenizer(self, folder: Path) -> None:
        """Write it into a drafter's folder."""
        load_pretrained_tokenizer(self._folder).save_pretrained(folder)


class OtherVocabularyLearner(DraftModelLearner):
    """A draft model that reads and writes tokens of its own."""

    def __init__(self, network: PreTrainedModel, reading: Rereading, weights: str) -> None:
        super().__init__(network, reading.vocabulary, weights)
        self._reading = reading

    def save(self, folder: Path, made_for: MadeFor) -> None:
        """See `Learner`: an ordinary folder of transformers with its tokenizer."""
        save_network(self.network, folder, self.weights)
        self._reading.save_tokenizer(folder)
        write_made_for(folder, made_for)
