"""Drafters of a chat model: `drafthouse train drafter | eagle3 | medusa | early-exit`.

The target is frozen and runs only to answer questions that it asks itself; what it computes for
that is recorded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.draft.heads.eagle3 import default_taps
from cluster.draft.vocabulary import DraftVocabulary
from cluster.models.resolve import resolve
from cluster.train.chat_answers import draw_shards, known_and_held_out
from cluster.train.chat_drafter import (
    DraftModelLearner,
    check_layers,
    kept_vocabulary,
    smaller_copy,
)
from cluster.train.chat_heads import (
    PHASE,
    HeadLoss,
    HeadOrder,
    HeadSettings,
    HeldOut,
    Learner,
    evaluate,
    learn,
)
from cluster.train.eagle3 import Eagle3Learner, new_head
from cluster.train.fixed_output import ExitLearner, MedusaLearner, new_exit, new_heads
from cluster.train.made_for import target_of
from cluster.train.other_vocabulary import OtherVocabularyLearner, Rereading
from cluster.train.processes import processes
from cluster.train.trainer import Budget, Rates

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
    orders = [
        HeadOrder(each, vocabulary.target_ids, len(vocabulary.draft_ids), PHASE.length, seed)
        for each in (known, held_out)
    ]
    del network
    loss = HeadLoss(learner)
    learn(loss, orders[0], budget, _RATES, seed, checkpoint=work / kind / "head.pt")
    if processes().is_main_process:
        learner.save(folder, target_of(target))
    learner.depth = settings.depth  # chains are measured, even where one draft is learnt
    return evaluate(learner, orders[1], held_out)


def new_learner(
    kind: str,
    network: PreTrainedModel,
    vocabulary: DraftVocabulary,
    taps: tuple[int, ...],
    settings: HeadSettings,
    reading: Rereading | None = None,
) -> Learner:
    """One of a kind, that has learned nothing yet.  taps: of the recorded states."""
    if reading:
        smaller = smaller_copy(reading.renamed(network), vocabulary, settings.num_layers)
        return OtherVocabularyLearner(smaller, reading, settings.weights)
    if kind == "drafter":
        smaller = smaller_copy(network, vocabulary, settings.num_layers)
        return DraftModelLearner(smaller, vocabulary, settings.weights)
    target_ids = torch.from_numpy(vocabulary.target_ids).long()
    if kind == "medusa":
        return MedusaLearner(network, new_heads(network, settings.depth), target_ids, len(taps) - 1)
    if kind == "early-exit":
        exit_head = new_exit(network, settings.exit_layer)
        column = taps.index(settings.exit_layer)
        return ExitLearner(network, exit_head, target_ids, column)
    head = new_head(network, taps[:-1], target_ids)
    return Eagle3Learner(head, settings.depth, tuple(range(len(taps) - 1)))
