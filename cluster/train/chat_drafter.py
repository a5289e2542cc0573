"""A small draft model of a chat model: `drafthouse train drafter`.

It has the target's width, some of its layers and the most frequent part of its vocabulary, and
starts from the target's own weights.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cluster.draft.intersection import Intersection, RewrittenText
from cluster.draft.vocabulary import DraftVocabulary, load_draft_vocabulary
from cluster.errors import ConfigError
from cluster.models.fingerprint import folder_tokenizer_hash, load_pretrained_tokenizer
from cluster.models.grouped import save_int8
from cluster.models.made_for import MadeFor, write_config, write_made_for
from cluster.models.token_bytes import TokenBytes
from cluster.train.chat_heads import WEIGHTS, HeadBatch, Learner
from cluster.train.generate import GeneratedAnswer
from cluster.train.trainer import processes

# A configuration's tokens that stand for no text.
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


class DraftModelLearner(Learner):
    """The draft model that serves.  It reads the text alone, so that one depth is all there is to
    learn; chains of more are measured."""

    _draft_ids: torch.Tensor
    depth = 1

    def __init__(
        self,
        network: PreTrainedModel,
        vocabulary: DraftVocabulary,
        weights: str = WEIGHTS[0],
        tokenizer: Path | None = None,
    ) -> None:
        """weights: how it is written, one of WEIGHTS.  tokenizer: the folder of its own, of which
        it has all tokens; None = it has some of the target's."""
        super().__init__()
        self.network = network
        self.vocabulary = vocabulary
        self.weights = weights
        self._tokenizer = tokenizer
        ids = torch.from_numpy(vocabulary.draft_ids).long()
        self.register_buffer("_draft_ids", ids, persistent=False)

    def drafts(self, batch: HeadBatch, first: int) -> list[torch.Tensor]:
        """See `Learner`."""
        read = self._draft_ids[batch.token_ids]
        rows = self.network.base_model(input_ids=read, use_cache=False).last_hidden_state
        return [rows[:, first + 1 + ahead :] for ahead in range(self.depth)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Learner`."""
        return self.network.get_output_embeddings()(hidden)

    def save(self, folder: Path, made_for: MadeFor) -> None:
        """See `Learner`: a folder of transformers with its draft vocabulary or its tokenizer."""
        save_network(self.network, folder, self.weights)
        if self._tokenizer is None:
            self.vocabulary.save(folder)
        else:
            load_pretrained_tokenizer(self._tokenizer).save_pretrained(folder)
        write_made_for(folder, made_for)


def kept_vocabulary(
    work: Path,
    answers: Sequence[GeneratedAnswer],
    network: PreTrainedModel,
    size: int,
    source: Path,
) -> DraftVocabulary:
    """The draft vocabulary of the run in `work`, chosen when it began: answers that are added later
    must not change what the network means."""
    vocabulary = load_draft_vocabulary(work)
    if vocabulary is None:
        vocabulary = frequent_vocabulary(answers, network, size, folder_tokenizer_hash(source))
        processes().wait_for_everyone()
        if processes().is_main_process:
            work.mkdir(parents=True, exist_ok=True)
            vocabulary.save(work)
    return vocabulary


def frequent_vocabulary(
    answers: Sequence[GeneratedAnswer],
    network: PreTrainedModel,
    size: int,
    tokenizer_hash: str,
) -> DraftVocabulary:
    """The tokens that the target is expected to write most often, and its special ones.

    Each other token is read as the one whose embedding points in the most similar direction.
    """
    embedding = network.get_input_embeddings().weight.detach().float().cpu()
    num_tokens = len(embedding)
    expected = np.zeros(num_tokens)
    for answer in answers:
        np.add.at(expected, answer.candidates, np.exp(answer.log_probs.astype(np.float64)))
        # What is read counts too, a little: of equally unlikely tokens those of the questions.
        np.add.at(expected, answer.prompt, 1e-3)
    expected[[each for name in _SPECIAL for each in _ids(network.config, name)]] = np.inf
    target_ids = np.sort(np.argsort(-expected, kind="stable")[:size]).astype(np.int32)
    directions = nn.functional.normalize(embedding, dim=-1)
    kept = directions[torch.from_numpy(target_ids).long()]
    nearest = torch.cat([(part @ kept.T).argmax(dim=-1) for part in torch.split(directions, 4096)])
    draft_ids = nearest.numpy().astype(np.int32)
    draft_ids[target_ids] = np.arange(len(target_ids))
    return DraftVocabulary(target_ids, draft_ids, tokenizer_hash)


def check_layers(num_layers: int, total: int) -> None:
    """Raise ConfigError for more layers than the target has."""
    if not 0 < num_layers <= total:
        raise ConfigError(f"--layers {num_layers}: the target has {total}; choose 1 to {total}")


def smaller_copy(
    network: PreTrainedModel, vocabulary: DraftVocabulary, num_layers: int
) -> PreTrainedModel:
    """The target's first layers with the draft vocabulary's embeddings.

    Its last ones are a worse start: they expect what all the layers between add up to.
    """
    config = copy.deepcopy(network.config)
    check_layers(num_layers, config.num_hidden_layers)
    config.num_hidden_layers, config.vocab_size = num_layers, len(vocabulary.target_ids)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    for name in _SPECIAL:
        ids = [vocabulary.draft_id_of(each) for each in _ids(config, name)]
        is_list = isinstance(getattr(config, name, None), list)
        setattr(config, name, ids if is_list else next(iter(ids), None))
    smaller: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    kept = torch.from_numpy(vocabulary.target_ids).long()
    weights = network.state_dict()
    chosen: dict[str, torch.Tensor] = {}
    for name, mine in smaller.state_dict().items():
        theirs = weights.get(name)
        if theirs is not None and len(theirs) == len(vocabulary.draft_ids):
            theirs = theirs[kept]
        if theirs is None or theirs.shape != mine.shape:
            raise ConfigError(
                f"the target's architecture {type(network).__name__} cannot be cut: {name} has no "
                "counterpart; train drafters of models with ordinary decoder layers"
            )
        chosen[name] = theirs.clone()
    smaller.load_state_dict(chosen)
    for name in _SPECIAL:
        setattr(smaller.generation_config, name, getattr(config, name))
    return smaller.train()


def _ids(config: PreTrainedConfig, name: str) -> list[int]:
    value = getattr(config, name, None)
    ids = value if isinstance(value, list) else [value]
    return [each for each in ids if each is not None]


def save_network(network: PreTrainedModel, folder: Path, weights: str) -> None:
    """Write a Hugging Face folder; the network is not changed.

    weights: bfloat16 or float32, which transformers loads as well, or int8 (see
    `cluster.models.grouped`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    if weights == "int8":
        state = network.state_dict()
        if network.config.tie_word_embeddings:
            del state["lm_head.weight"]
        save_int8(state, folder)
        network.config.save_pretrained(folder)
        network.generation_config.save_pretrained(folder)
    else:
        copy.deepcopy(network).to(getattr(torch, weights)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)  # a path of this machine
    if weights == "int8":
        config["dtype"] = "bfloat16"  # in which it computes
    write_config(folder, config)


# A drafter with a tokenizer of its own: the target's answers in its tokens, and its first
# weights.
#
# It reads the answers as it will read texts in serving (`cluster.draft.intersection`). So behind
# each of the target's tokens it may learn the target's law, as far as it has these tokens.


class Rereading:
    """Reads the target's answers in the tokens of another tokenizer.

    folder, drafter, vocabulary: where that is, its tokens, and all of them."""

    def __init__(self, target: Path, drafter: Path, network: PreTrainedModel) -> None:
        """target, drafter: folders with tokenizers.  network: the target."""
        self.folder = drafter
        self.drafter = TokenBytes.load(drafter)
        size = len(self.drafter.bytes_of)
        ids = np.arange(size, dtype=np.int32)
        self.vocabulary = DraftVocabulary(ids, ids)
        target_size = network.get_input_embeddings().num_embeddings
        self._shared = Intersection(
            TokenBytes.load(target), self.drafter, target_size, size, "text"
        )

    def __call__(self, answer: GeneratedAnswer) -> GeneratedAnswer:
        """The answer in the drafter's tokens.

        Its laws are the target's, by the drafter's tokens: a candidate that it lacks has no
        probability, and no law is known between the tokens that stand for one of the target's.
        """
        text = RewrittenText(self._shared)
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
        shared = self._shared
        same = zip(shared.order.tolist(), shared.vocabulary.target_ids.tolist(), strict=False)
        sources = {draft_id: [target_id] for draft_id, target_id in same}
        for draft_id, data in enumerate(self.drafter.bytes_of):
            # Some vocabularies lack bytes, and special tokens have none.
            sources.setdefault(draft_id, shared.target.write(data)[0] or [0])
        renamed, size = copy.deepcopy(network), len(self.drafter.bytes_of)
        renamed.resize_token_embeddings(size, mean_resizing=False)
        for ours, theirs in (
            (renamed.get_input_embeddings(), network.get_input_embeddings()),
            (renamed.get_output_embeddings(), network.get_output_embeddings()),
        ):
            rows = theirs.weight.detach()
            means = [rows[sources[each]].mean(dim=0) for each in range(size)]
            ours.weight.data = torch.stack(means)
        renamed.config.bos_token_id = renamed.config.pad_token_id = None
        renamed.config.eos_token_id = list(self.drafter.ends) or None
        return renamed
