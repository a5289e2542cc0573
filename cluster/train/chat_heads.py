"""Learning from a chat model's own answers: order, loss and measure of all kinds of drafters.

The target is frozen and does not run: its laws, and for heads its hidden rows, were recorded while
it answered (`cluster.train.chat_answers`).  The module that is trained is the one that serves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn

from cluster.draft.vocabulary import DraftVocabulary
from cluster.errors import ConfigError
from cluster.models.fingerprint import model_hash
from cluster.models.made_for import MadeFor, write_config
from cluster.models.names import served_name
from cluster.models.resolve import resolve
from cluster.records import frozen, record
from cluster.train.chat_answers import AnswerSettings
from cluster.train.generate import GeneratedAnswer
from cluster.train.trainer import Budget, Rates, Trainer, TrainingPhase, TrainSettings

# How a draft model is written, the usual way first.
WEIGHTS = ("bfloat16", "int8", "float32")
# Conversations one by one, cut to so many tokens: nothing is padded.
PHASE = TrainingPhase(0.0, length=768, rows=1)
_CONVERSATIONS_PER_STEP = 4


@frozen
class HeadSettings:
    """depth: drafts in a chain that training looks at.
    exit_layer: of an early exit, the target's layers that run; 0 = half of them.
    vocab_size: 0 = a drafter that goes on learning keeps its own.
    num_layers, weights: of a draft model, the layers that it takes of the target and how it is
    written, one of WEIGHTS.  tokenizer: of a draft model, the model whose tokens it has in place of
    the target's.
    starts_from: the folder of a draft model that goes on learning (`cluster.train.runs`), ""
    = none.  from_traffic: the recorder's folder, or one tenant's in it, that it learns from; None =
    there is no traffic.  mix: beside traffic, the share of the target's own answers to questions
    that it asks itself.  loss: "acceptance" = `TrafficLoss`."""

    depth: int = 4
    vocab_size: int = 8192
    num_answer_tokens: int = 600_000
    answers: AnswerSettings = field(default_factory=AnswerSettings)
    exit_layer: int = 0
    num_layers: int = 2
    weights: str = WEIGHTS[0]
    tokenizer: str = ""
    starts_from: str = ""
    from_traffic: Path | None = None
    mix: float = 0.5
    loss: str = ""


class HeadBatch(NamedTuple):
    """A conversation with what the target computed along it.

    token_ids: int64[1, width], the target's ids.  states: bfloat16[1, width, taps, hidden]; None
    where none were recorded.  is_greedy: whether every token of the answer is the law's most
    probable one.
    candidates: int64[1, width, k], draft ids, best first, of the law after each token.
    probs: float32[1, width, k], 0 outside the draft vocabulary and where no law was recorded.
    is_known: bool[1, width], whether one was.  is_rejected: bool[1, width], `Answer.rejected`.
    """

    token_ids: torch.Tensor
    states: torch.Tensor | None
    is_greedy: bool
    candidates: torch.Tensor
    probs: torch.Tensor
    is_known: torch.Tensor
    is_rejected: torch.Tensor

    def tapped(self, columns: int | slice) -> torch.Tensor:
        """Columns of the states; raises ConfigError where none were recorded."""
        if self.states is None:
            raise ConfigError("the answers were drawn without hidden rows; draw them anew")
        return self.states[:, :, columns]


class Learner(nn.Module, ABC):
    """A drafter's module, and what it drafts along a conversation.

    depth: drafts in a chain.
    """

    depth: int

    @abstractmethod
    def drafts(self, batch: HeadBatch, first: int) -> list[torch.Tensor]:
        """For each depth d what `logits` reads, [1, width - 1 - d - first, hidden]: row t, from
        `first` on, drafts token t + d + 2, by the law after token t + d + 1."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, draft vocabulary]."""

    @abstractmethod
    def save(self, folder: Path, made_for: MadeFor) -> None:
        """Write the public format, and the target that it was made for."""


@frozen
class HeldOut:
    """A drafter along answers that it did not learn from.

    loss_nats: per depth.  agreement: per depth, places where the most likely tokens are the same,
    given that all drafts before are right.  chain_len: mean acceptance length of greedy chains
    along greedy answers.  coverage: of the target's law by the draft vocabulary.
    acceptance, excess_nats: of the first drafts, the means of sum min(p, q) and of sum p log(p / q)
    over the target's recorded candidates that the drafter can write.
    """

    num_answers: int
    loss_nats: list[float]
    agreement: list[float]
    chain_len: float
    coverage: float
    acceptance: float
    excess_nats: float


class HeadOrder:
    """An order of whole conversations, fixed by a seed."""

    def __init__(
        self, answers: Sequence[GeneratedAnswer], vocabulary: DraftVocabulary, seed: int
    ) -> None:
        """vocabulary: in which the drafter writes."""
        self._answers = answers
        self._seed = seed
        self._draft_ids = np.full(len(vocabulary.draft_ids), -1, np.int64)
        self._draft_ids[vocabulary.target_ids] = np.arange(len(vocabulary.target_ids))

    def read(self, first: int, count: int) -> HeadBatch:
        """See `cluster.train.trainer.Order`."""
        assert count == 1, "conversations are read one by one"
        epoch, index = divmod(first, len(self._answers))
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._answers))
        return self.batch(self._answers[order[index]])

    def batch(self, answer: GeneratedAnswer) -> HeadBatch:
        """A conversation, cut to the phase's length."""
        text = np.concatenate([answer.prompt, answer.token_ids])[: PHASE.length]
        # The answer's first token was drawn by the law after the prompt's last.
        start, num_known = len(answer.prompt) - 1, len(text) - len(answer.prompt)
        ids = self._draft_ids[answer.candidates[:num_known]]
        law = np.exp(answer.log_probs[:num_known].astype(np.float32))
        around, states = (start, 1), answer.states
        if states is not None:
            states = states[: len(text)]
            # The last token has none.
            states = np.pad(states, ((0, len(text) - len(states)), (0, 0), (0, 0)))
        is_rejected = np.zeros(len(text), np.bool_)
        if answer.rejected is not None:
            is_rejected[start + answer.rejected[answer.rejected < num_known]] = True
        has_best = np.isfinite(answer.log_probs[:, 0])
        arrays = (
            np.pad(np.maximum(ids, 0), (around, (0, 0))),
            np.pad(law * (ids >= 0), (around, (0, 0))),
            np.pad(law.any(axis=1), around),
            is_rejected,
        )
        return HeadBatch(
            torch.from_numpy(text.astype(np.int64))[None],
            None if states is None else torch.from_numpy(states).view(torch.bfloat16)[None],
            bool((answer.candidates[:, 0] == answer.token_ids)[has_best].all()),
            *(torch.from_numpy(each)[None] for each in arrays),
        )


# A draft counts so much less than the one before it: it matters only where that one was right.
_DEPTH_WEIGHT = 0.8


@record
class DepthDrafts:
    """Those of one depth at the places whose law is recorded.

    logits: [n, draft vocabulary].  probs, candidates: [n, k], of the laws.  log_probs: [n, k], the
    learner's of these candidates.  is_rejected: bool[n].
    """

    logits: torch.Tensor
    probs: torch.Tensor
    candidates: torch.Tensor
    log_probs: torch.Tensor
    is_rejected: torch.Tensor

    @property
    def cross_entropy(self) -> torch.Tensor:
        """The mean over the draft vocabulary; without the laws' constant entropy it is the
        Kullback-Leibler divergence."""
        return -(self.probs * self.log_probs).sum() / len(self.probs)

    @property
    def acceptance(self) -> torch.Tensor:
        """The probability that rejection sampling accepts, sum min(p, q): [n]."""
        return torch.minimum(self.probs, self.log_probs.exp()).sum(dim=-1)

    @property
    def excess(self) -> torch.Tensor:
        """sum p log(p / q): [n]."""
        return (self.probs * (self.probs.clamp(min=1e-9).log() - self.log_probs)).sum(dim=-1)

    @property
    def is_right(self) -> torch.Tensor:
        """True where the most likely tokens are the same: bool[n]."""
        is_written = self.probs[:, 0] > 0.0
        return (self.logits.argmax(dim=-1) == self.candidates[:, 0]) & is_written


def known_drafts(learner: Learner, batch: HeadBatch) -> Iterator[DepthDrafts]:
    """The drafts of each depth."""
    first_known = int(batch.is_known.any(dim=0).int().argmax())
    first = max(first_known - learner.depth, 0)
    for ahead, hidden in enumerate(learner.drafts(batch, first), 1):
        known = batch.is_known.clone()
        known[:, : first + ahead] = False
        logits = learner.logits(hidden[known[:, first + ahead :]])
        candidates = batch.candidates[known]
        picked = torch.log_softmax(logits.float(), dim=-1).gather(1, candidates)
        yield DepthDrafts(logits, batch.probs[known], candidates, picked, batch.is_rejected[known])


class HeadLoss(nn.Module):
    """The mean cross-entropy over the places of answers, summed over depths."""

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self.learner = learner

    def forward(self, batch: HeadBatch) -> torch.Tensor:
        total = torch.zeros((), device=batch.probs.device)
        for depth, drafts in enumerate(known_drafts(self.learner, batch)):
            if len(drafts.probs):
                total = total + _DEPTH_WEIGHT**depth * drafts.cross_entropy
        return total


def learn(
    loss: HeadLoss,
    order: HeadOrder,
    budget: Budget,
    rates: Rates,
    seed: int,
    checkpoint: Path | None = None,
) -> None:
    """Train a learner to the end of its budget."""
    num_tokens = PHASE.length * _CONVERSATIONS_PER_STEP
    settings = TrainSettings(budget, (PHASE,), num_tokens, seed, rates)
    Trainer(loss, [order.read], settings, checkpoint).run()


@torch.no_grad()
def evaluate(
    learner: Learner, vocabulary: DraftVocabulary, answers: Sequence[GeneratedAnswer]
) -> HeldOut:
    """Measure a drafter along answers that it did not learn from."""
    device, order = next(learner.parameters()).device, HeadOrder(answers, vocabulary, 0)
    losses: list[list[float]] = []
    matches: list[list[NDArray[np.bool_]]] = []
    chains, coverages = list[float](), list[float]()
    accepted, excess = list[torch.Tensor](), list[torch.Tensor]()
    for answer in answers:
        batch = send_to_device(order.batch(answer), device)
        found = list(known_drafts(learner, batch))
        losses.append([float(each.cross_entropy) for each in found])
        matches.append([each.is_right.cpu().numpy() for each in found])
        accepted.append(found[0].acceptance)
        excess.append(found[0].excess)
        coverages.append(float(batch.probs[batch.is_known].sum(dim=-1).mean()))
        if batch.is_greedy:
            chains.append(mean_chain_len(matches[-1]))
    means = (float(torch.cat(each).double().mean()) for each in (accepted, excess))
    return HeldOut(
        len(answers),
        [float(np.mean(each)) for each in zip(*losses, strict=True)],
        [float(np.concatenate(each).mean()) for each in zip(*matches, strict=True)],
        float(np.mean(chains)) if chains else float("nan"),
        float(np.mean(coverages)),
        *means,
    )


def mean_chain_len(matches: Sequence[NDArray[np.bool_]]) -> float:
    """Tokens a step when a chain of as many drafts as there are depths is verified each time.

    matches[d][i]: whether the draft for the answer's token i + shift is right at depth d, where
    each depth lacks the first tokens that are too early for it; all end with the last token.
    """
    num_tokens = min(map(len, matches))
    level = [each[len(each) - num_tokens :] for each in matches]
    place, num_steps = 0, 0
    while place < num_tokens:
        chain = (each[place + ahead] for ahead, each in enumerate(level[: num_tokens - place]))
        place += len(list(takewhile(bool, chain))) + 1
        num_steps += 1
    return num_tokens / max(num_steps, 1)


# A trained drafter's note of its target, and a head's folder with it.


def target_of(model: str) -> MadeFor:
    """The target of a training, by its name or folder."""
    return MadeFor(served_name(model), model_hash(resolve(model)))


def save_head(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], made_for: MadeFor
) -> None:
    """Write a head's folder: model.safetensors, whose weights are rounded to bfloat16, and
    config.json with the target that it was made for."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(rounded, folder / "model.safetensors")
    write_config(folder, made_for.written_into({**config, "torch_dtype": "bfloat16"}))
