"""Drafters of a chat model: `drafthouse train drafter | eagle3 | medusa | early-exit`.

The target is frozen and runs only to answer questions that it asks itself; what it computes for
that is recorded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.draft.heads.eagle3 import default_taps
from cluster.draft.heads.exit import ARCHITECTURE, ExitHead
from cluster.draft.heads.medusa import MedusaHead, MedusaSpec
from cluster.draft.vocabulary import DraftVocabulary
from cluster.errors import ConfigError
from cluster.models.made_for import MadeFor
from cluster.models.resolve import resolve
from cluster.train.chat_answers import draw_shards, known_and_held_out
from cluster.train.chat_drafter import (
    DraftModelLearner,
    Rereading,
    check_layers,
    kept_vocabulary,
    smaller_copy,
)
from cluster.train.chat_heads import (
    PHASE,
    HeadBatch,
    HeadLoss,
    HeadOrder,
    HeadSettings,
    HeldOut,
    Learner,
    evaluate,
    learn,
    save_head,
    target_of,
)
from cluster.train.eagle3 import Eagle3Learner, new_head
from cluster.train.processes import processes
from cluster.train.trainer import Budget, Rates

# Medusa heads and early exits as they are trained: the target's own output layer reads them.


class FixedOutputLearner(Learner):
    """The module that serves, read by rows of the output layer."""

    _output: torch.Tensor

    def __init__(
        self, network: PreTrainedModel, head: Any, target_ids: torch.Tensor, column: int, depth: int
    ) -> None:
        """network: the target.  target_ids: int64[n], the tokens among which it learns to choose; a
        part of them is enough to learn from, and quicker.  column: of the rows that it takes in the
        states."""
        super().__init__()
        self.head = head
        self.depth = depth
        output = network.get_output_embeddings().weight.detach()
        self._vocab_size, self._size = output.shape
        self.register_buffer("_output", output[target_ids], persistent=False)
        self._column = column

    def rows(self, batch: HeadBatch) -> torch.Tensor:
        """What it takes along conversations: [rows, width, hidden]."""
        return batch.tapped(self._column).to(self._output.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Learner`."""
        return hidden @ self._output.T


class MedusaLearner(FixedOutputLearner):
    """Every head reads the target's last hidden row."""

    def drafts(self, batch: HeadBatch, first: int) -> list[torch.Tensor]:
        """See `Learner`."""
        rows = self.rows(batch)[:, first:-1]
        blocks = enumerate(self.head.blocks.children())
        return [block(rows)[:, : rows.shape[1] - depth] for depth, block in blocks]

    def save(self, folder: Path, made_for: MadeFor) -> None:
        """See `Learner`: vLLM's format, with the target's own output layer."""
        spec = self.head.spec
        tensors = {
            f"blocks.{name}": tensor for name, tensor in self.head.blocks.state_dict().items()
        }
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.draft_vocab_size,
            "truncated_vocab_size": spec.draft_vocab_size,
            "num_heads": spec.num_heads,
            "num_hidden_layers": spec.num_layers,
            "original_lm_head": True,
            "medusa_fc_bias": spec.has_bias,
        }
        save_head(folder, tensors, config, made_for)


class ExitLearner(FixedOutputLearner):
    """It reads the rows behind one of the target's layers.  Behind right drafts these are those of
    the text, so that one depth is all there is to learn; chains of more are measured."""

    def __init__(
        self,
        network: PreTrainedModel,
        head: ExitHead,
        target_ids: torch.Tensor,
        column: int,
    ) -> None:
        super().__init__(network, head, target_ids, column, depth=1)
        self._norm = _final_norm(network)

    def drafts(self, batch: HeadBatch, first: int) -> list[torch.Tensor]:
        """See `Learner`."""
        with torch.no_grad():
            rows = self._norm(self.rows(batch)[:, first + 1 :])
        found = self.head(rows)
        return [found[:, ahead:] for ahead in range(self.depth)]

    def save(self, folder: Path, made_for: MadeFor) -> None:
        """See `Learner`: there is no public format; ours is that of `cluster.draft.heads.exit`."""
        config = {
            "architectures": [ARCHITECTURE],
            "exit_layer": self.head.exit_layer,
            "hidden_size": self._size,
            "vocab_size": self._vocab_size,
        }
        save_head(folder, self.head.state_dict(), config, made_for)


def new_heads(network: PreTrainedModel, num_heads: int) -> MedusaHead:
    """Heads that begin as the identity: each says what the target says of the next token."""
    output = network.get_output_embeddings().weight.detach()
    spec = MedusaSpec(
        num_heads, 1, output.shape[1], len(output), has_bias=True, uses_target_head=True
    )
    head = MedusaHead(spec, output)
    with torch.no_grad():
        for parameter in head.blocks.parameters():
            parameter.zero_()
    return head.train()


def new_exit(network: PreTrainedModel, exit_layer: int) -> ExitHead:
    """One that says what the untrained exit says; raises ConfigError for a layer that is none."""
    num_layers = network.config.get_text_config().num_hidden_layers
    if not 0 < exit_layer < num_layers:
        raise ConfigError(
            f"exit layer {exit_layer}: the target has {num_layers} layers; name one between them",
            param="exit_layer",
        )
    return ExitHead(exit_layer, network.get_output_embeddings().weight.shape[1]).train()


def _final_norm(network: PreTrainedModel) -> nn.Module:
    found = getattr(network.base_model, "norm", None)
    if not isinstance(found, nn.Module):
        raise ConfigError(
            f"{type(network).__name__}: its final norm is not called `norm`; early exits cannot "
            "be trained for it"
        )
    return found.requires_grad_(False)


# Lower rates than from scratch: the weights start from good ones.
_RATES = Rates(muon=0.015, adamw=0.003, warmup=0.03, decay=0.97)


def train_head(
    kind: str,
    target: str,
    work: Path,
    folder: Path,
    settings: HeadSettings,
    budget: Budget,
    seed: int = 0,
) -> HeldOut:
    """Let `target` answer, train a drafter in `work` or resume it, and save it in `folder`.

    kind: drafter, eagle3, medusa or early-exit.  Answers are shared by all heads of one `work`, but
    for an exit behind a layer that no other head taps.  Returns how the drafter does along answers
    that were kept out of training.
    """
    source = resolve(target)
    network: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    num_layers = network.config.num_hidden_layers
    taps: tuple[int, ...] = (*default_taps(num_layers), num_layers)
    shards = work / "answers"
    settings = replace(settings, exit_layer=settings.exit_layer or max(num_layers // 2, 1))
    if kind == "drafter":
        check_layers(settings.num_layers, num_layers)
        taps = ()
    if kind == "early-exit" and settings.exit_layer not in taps:
        taps, shards = (settings.exit_layer,), work / f"answers-{settings.exit_layer}"
    drawn = replace(settings.answers, taps=taps)
    draw_shards(source, shards, settings.num_answer_tokens, seed, drawn)
    reading = None
    if settings.tokenizer:
        reading = Rereading(source, resolve(settings.tokenizer), network)
    known, held_out = known_and_held_out(shards, PHASE.length - 2, reading)
    if reading:
        vocabulary = reading.vocabulary
    else:
        vocabulary = kept_vocabulary(work / kind, known, network, settings.vocab_size, source)
    torch.manual_seed(seed)
    learner = new_learner(kind, network, vocabulary, taps, settings, reading)
    del network
    order, checkpoint = HeadOrder(known, vocabulary, seed), work / kind / "head.pt"
    learn(HeadLoss(learner), order, budget, _RATES, seed, checkpoint)
    if processes().is_main_process:
        learner.save(folder, target_of(target))
    learner.depth = settings.depth  # chains are measured, even where one draft is learnt
    return evaluate(learner, vocabulary, held_out)


def new_learner(
    kind: str,
    network: PreTrainedModel,
    vocabulary: DraftVocabulary,
    taps: tuple[int, ...],
    settings: HeadSettings,
    reading: Rereading | None = None,
) -> Learner:
    """One of a kind, that has learned nothing yet.  taps: of the recorded states."""
    if kind == "drafter":
        whole, tokenizer = (
            (reading.renamed(network), reading.folder) if reading else (network, None)
        )
        smaller = smaller_copy(whole, vocabulary, settings.num_layers)
        return DraftModelLearner(smaller, vocabulary, settings.weights, tokenizer)
    target_ids = torch.from_numpy(vocabulary.target_ids).long()
    if kind == "medusa":
        medusa = new_heads(network, settings.depth)
        return MedusaLearner(network, medusa, target_ids, len(taps) - 1, settings.depth)
    if kind == "early-exit":
        exit_head = new_exit(network, settings.exit_layer)
        column = taps.index(settings.exit_layer)
        return ExitLearner(network, exit_head, target_ids, column)
    head = new_head(network, taps[:-1], target_ids)
    return Eagle3Learner(head, settings.depth, tuple(range(len(taps) - 1)))
