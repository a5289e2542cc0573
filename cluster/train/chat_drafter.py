"""Distils a small drafter from a chat model's own answers: `drafthouse train drafter --target`.

The drafter has the target's width, some of its layers and the most frequent part of its vocabulary,
and starts from the target's own weights.  It is trained on what the target said while it answered
(`cluster.train.chat_answers`), so training needs no forward pass of the target.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cluster.draft.vocabulary import DraftVocabulary, load_draft_vocabulary
from cluster.errors import ConfigError
from cluster.models.fingerprint import folder_tokenizer_hash
from cluster.models.int8 import save_int8
from cluster.models.made_for import write_made_for
from cluster.models.resolve import resolve
from cluster.train.acceptance import mean_acceptance_len
from cluster.train.chat_answers import Answer, AnswerSettings, draw_shards, known_and_held_out
from cluster.train.chat_order import ConversationOrder
from cluster.train.made_for import target_of
from cluster.train.optimizer import Rates
from cluster.train.processes import processes
from cluster.train.trainer import Budget, Phase, Trainer, TrainSettings

# Lower rates than from scratch: the weights start from good ones.
_RATES = Rates(muon=0.015, adamw=0.003, warmup=0.03, decay=0.97)
# Tokens of a conversation that are read, and conversations of a micro-batch and of a step.
_PHASE = Phase(0.0, length=1024, rows=2)
_CONVERSATIONS_PER_STEP = 4

# How a drafter is written, the usual way first.
WEIGHTS = ("bfloat16", "int8", "float32")


@dataclass(frozen=True, slots=True)
class ChatDrafterSettings:
    """How large the drafter is, and how many tokens of answers it learns from."""

    num_layers: int = 2
    vocab_size: int = 10_240
    num_answer_tokens: int = 600_000
    weights: str = WEIGHTS[0]
    answers: AnswerSettings = field(default_factory=AnswerSettings)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The drafter along answers that it did not learn from.

    loss_nats: cross-entropy with the target's law over the draft vocabulary.  agreement: places
    where the most likely tokens are the same.  chain_len: mean acceptance length of greedy chains
    of four along greedy answers.  coverage: of the target's law by the draft vocabulary.
    """

    num_answers: int
    loss_nats: float
    agreement: float
    chain_len: float
    coverage: float


class AnswerBatch(NamedTuple):
    """Conversations, and what the target thought at each place of an answer.

    token_ids: int64[rows, width], draft ids.  places: int64[n], indices into the flattened rows
    from which a token of an answer is predicted.  candidates: int64[n, k], draft ids.
    probs: float32[n, k], of the target's law, 0 for tokens outside the draft vocabulary.
    """

    token_ids: torch.Tensor
    places: torch.Tensor
    candidates: torch.Tensor
    probs: torch.Tensor


class AnswerOrder(ConversationOrder[AnswerBatch]):
    """What a draft model learns of each conversation."""

    def __init__(
        self, answers: Sequence[Answer], vocabulary: DraftVocabulary, length: int, seed: int
    ) -> None:
        super().__init__(answers, seed)
        self._vocabulary = vocabulary
        self._length = length

    def batch(self, answers: Sequence[Answer]) -> AnswerBatch:
        texts = [self._read(each) for each in answers]
        width = max(map(len, texts))
        rows = np.zeros((len(answers), width), np.int64)
        places: list[NDArray[np.int64]] = []
        candidates: list[NDArray[np.int32]] = []
        log_probs: list[NDArray[np.float16]] = []
        for index, (answer, text) in enumerate(zip(answers, texts, strict=True)):
            rows[index, : len(text)] = text
            first = len(answer.prompt) - 1
            num_known = len(text) - first
            places.append(index * width + first + np.arange(num_known))
            candidates.append(answer.candidates[:num_known])
            log_probs.append(answer.log_probs[:num_known])
        ids = np.concatenate(candidates)
        draft_ids = self._vocabulary.draft_ids[ids]
        is_written = self._vocabulary.target_ids[draft_ids] == ids
        probs = np.exp(np.concatenate(log_probs).astype(np.float32)) * is_written
        return AnswerBatch(
            torch.from_numpy(rows),
            torch.from_numpy(np.concatenate(places)),
            torch.from_numpy(draft_ids.astype(np.int64)),
            torch.from_numpy(probs),
        )

    def _read(self, answer: Answer) -> NDArray[np.int32]:
        """The conversation without its last token, which predicts nothing."""
        text = np.concatenate([answer.prompt, answer.token_ids])[: self._length][:-1]
        return self._vocabulary.read(text)


def train_chat_drafter(
    target: str,
    work: Path,
    folder: Path,
    settings: ChatDrafterSettings,
    budget: Budget,
    seed: int = 0,
) -> HeldOut:
    """Let `target` answer, train its drafter in `work` or resume it, and save it in `folder`.

    Returns how it does along answers that were kept out of training.
    """
    source, shards = resolve(target), work / "answers"
    draw_shards(source, shards, settings.num_answer_tokens, seed, settings.answers)
    known, held_out = known_and_held_out(shards, _PHASE.length - 1)
    network: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    vocabulary = kept_vocabulary(work, known, network, settings.vocab_size, source)
    torch.manual_seed(seed)
    drafter = smaller_copy(network, vocabulary, settings.num_layers)
    del network
    order = AnswerOrder(known, vocabulary, _PHASE.length, seed)
    trainer = Trainer(
        AnswerLoss(drafter),
        [order],
        TrainSettings(budget, (_PHASE,), _PHASE.length * _CONVERSATIONS_PER_STEP, seed, _RATES),
        checkpoint=work / "drafter.pt",
    )
    trainer.resume()
    trainer.run()
    if processes().is_main_process:
        save_drafter(drafter, vocabulary, folder, settings.weights)
        write_made_for(folder, target_of(target))
    return evaluate(drafter, AnswerOrder(held_out, vocabulary, _PHASE.length, seed), held_out)


def kept_vocabulary(
    work: Path, answers: Sequence[Answer], network: PreTrainedModel, size: int, source: Path
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
    answers: Sequence[Answer],
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
    expected[_special_ids(network.config)] = np.inf
    target_ids = np.sort(np.argsort(-expected, kind="stable")[:size]).astype(np.int32)
    directions = nn.functional.normalize(embedding, dim=-1)
    kept = directions[torch.from_numpy(target_ids).long()]
    nearest = torch.cat([(part @ kept.T).argmax(dim=-1) for part in torch.split(directions, 4096)])
    draft_ids = nearest.numpy().astype(np.int32)
    draft_ids[target_ids] = np.arange(len(target_ids))
    return DraftVocabulary(target_ids, draft_ids, tokenizer_hash)


def smaller_copy(
    network: PreTrainedModel, vocabulary: DraftVocabulary, num_layers: int
) -> PreTrainedModel:
    """The target's first layers with the draft vocabulary's embeddings.

    Its last ones are a worse start: they expect what all the layers between add up to.
    """
    config = copy.deepcopy(network.config)
    total = config.num_hidden_layers
    if not 0 < num_layers <= total:
        raise ConfigError(f"--layers {num_layers}: the target has {total}; choose 1 to {total}")
    config.num_hidden_layers, config.vocab_size = num_layers, len(vocabulary.target_ids)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    draft_id = vocabulary.draft_id_of
    for name in ("bos_token_id", "pad_token_id"):
        value = getattr(config, name, None)
        setattr(config, name, None if value is None else draft_id(value))
    ends = config.eos_token_id
    if isinstance(ends, list):
        config.eos_token_id = [draft_id(each) for each in ends]
    else:
        config.eos_token_id = None if ends is None else draft_id(ends)
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
    smaller.generation_config.eos_token_id = config.eos_token_id
    smaller.generation_config.bos_token_id = config.bos_token_id
    smaller.generation_config.pad_token_id = config.pad_token_id
    return smaller.train()


def _special_ids(config: PreTrainedConfig) -> list[int]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    values = [getattr(config, name, None) for name in names]
    listed = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return [each for each in listed if each is not None]


class AnswerLoss(nn.Module):
    """Cross-entropy with the target's law over the draft vocabulary.

    Without the constant entropy of that law, it is the Kullback-Leibler divergence.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self._network = network

    def forward(self, batch: AnswerBatch) -> torch.Tensor:
        log_probs = self.log_probs(batch)
        picked = torch.gather(log_probs, 1, batch.candidates)
        return -(batch.probs * picked).sum() / len(batch.places)

    def log_probs(self, batch: AnswerBatch) -> torch.Tensor:
        """float32[places, draft vocabulary]."""
        hidden = self._network.base_model(
            input_ids=batch.token_ids, use_cache=False
        ).last_hidden_state
        logits = self._network.get_output_embeddings()(hidden.flatten(0, 1)[batch.places])
        return torch.log_softmax(logits.float(), dim=-1)


@torch.no_grad()
def evaluate(network: PreTrainedModel, order: AnswerOrder, answers: Sequence[Answer]) -> HeldOut:
    """Measure the drafter along answers that it did not learn from."""
    loss = AnswerLoss(network)
    losses: list[float] = []
    matches: list[NDArray[np.bool_]] = []
    lens: list[float] = []
    coverages: list[float] = []
    for answer in answers:
        batch = send_to_device(order.batch([answer]), network.device)
        log_probs = loss.log_probs(batch)
        picked = torch.gather(log_probs, 1, batch.candidates)
        losses.append(float(-(batch.probs * picked).sum() / len(batch.places)))
        is_first = log_probs.argmax(dim=-1) == batch.candidates[:, 0]
        matches.append((is_first & (batch.probs[:, 0] > 0.0)).cpu().numpy())
        coverages.append(float(batch.probs.sum() / len(batch.places)))
        if np.array_equal(answer.candidates[:, 0], answer.token_ids):
            lens.append(mean_acceptance_len(matches[-1]))
    return HeldOut(
        len(answers),
        float(np.mean(losses)),
        float(np.concatenate(matches).mean()),
        float(np.nanmean(lens)) if lens else float("nan"),
        float(np.mean(coverages)),
    )


def save_drafter(
    network: PreTrainedModel,
    vocabulary: DraftVocabulary,
    folder: Path,
    weights: str = WEIGHTS[0],
) -> None:
    """Write a Hugging Face folder and its vocabulary; the network is not changed.

    weights: bfloat16 or float32, which transformers loads as well, or int8 (`cluster.models.int8`).
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
    vocabulary.save(folder)
    config = folder / "config.json"
    data = json.loads(config.read_text(encoding="utf-8"))
    data.pop("_name_or_path", None)  # a path of this machine
    if weights == "int8":
        data["dtype"] = "bfloat16"  # in which it computes
    config.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
