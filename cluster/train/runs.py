"""Trainings of a chat model's drafters: `drafthouse train drafter | eagle3 | medusa | early-exit`.

The target is frozen and runs only to answer questions that it asks itself; what it computes for
that is recorded.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cluster.draft.heads.eagle3 import default_taps
from cluster.draft.recorded import Origin, RecordedAnswer, read_folder
from cluster.draft.vocabulary import DraftVocabulary, load_draft_vocabulary
from cluster.errors import ConfigError
from cluster.models.fingerprint import folder_tokenizer_hash, model_hash
from cluster.models.grouped import is_int8, load_int8
from cluster.models.made_for import folder_made_for
from cluster.models.resolve import resolve
from cluster.records import frozen
from cluster.train.chat_answers import HELD_OUT, draw_shards, known_and_held_out
from cluster.train.chat_drafter import (
    DraftModelLearner,
    Rereading,
    check_layers,
    frequent_vocabulary,
    kept_vocabulary,
    smaller_copy,
)
from cluster.train.chat_heads import (
    PHASE,
    WEIGHTS,
    HeadBatch,
    HeadLoss,
    HeadOrder,
    HeadSettings,
    HeldOut,
    Learner,
    evaluate,
    known_drafts,
    learn,
    target_of,
)
from cluster.train.generate import GeneratedAnswer
from cluster.train.heads import (
    Eagle3Learner,
    ExitLearner,
    MedusaLearner,
    new_exit,
    new_head,
    new_heads,
)
from cluster.train.trainer import Budget, Rates, processes

# Lower rates than from scratch: the weights start from good ones.
_FIRST_RATES = Rates(muon=0.015, adamw=0.003, warmup=0.03, decay=0.97)
# As of the specialists of the demonstration, which go on from a general drafter too.
_LATER_RATES = Rates(muon=0.006, adamw=0.0012, warmup=0.05, decay=0.95)
# A drafter is not written where it would accept so much less than the one that it starts from.
_LARGEST_FALL = 0.01
_HASH_DIGITS = 12


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
    learn(HeadLoss(learner), order, budget, _FIRST_RATES, seed, checkpoint)
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
        return MedusaLearner(network, medusa, target_ids, -1, settings.depth)
    if kind == "early-exit":
        exit_head = new_exit(network, settings.exit_layer)
        column = taps.index(settings.exit_layer)
        return ExitLearner(network, exit_head, target_ids, column)
    return Eagle3Learner(new_head(network, taps[:-1], target_ids), settings.depth)


# A drafter goes on learning: `drafthouse train drafter --starts-from`.
#
# It learns from served answers (`--from-traffic`), which the recorder (`cluster.draft.recorder`)
# has kept with the target's laws, so the target runs only for the original answers that are mixed
# in against forgetting.  Without served answers it learns from those to questions that the target
# asks itself alone, usually of one task.


@frozen
class Learned:
    """before, after: by what the held-out answers are, traffic or originals."""

    folder: Path
    num_tokens: int
    before: dict[str, HeldOut]
    after: dict[str, HeldOut]


class TrafficLoss(HeadLoss):
    """Cross-entropy with the target's law at all places, and the negative log of the acceptance at
    those where a step's drafts ended: there a better draft would have brought a token.

    What it brings is not measured (docs/benchmarks/learning)."""

    def forward(self, batch: HeadBatch) -> torch.Tensor:
        (drafts,) = known_drafts(self.learner, batch)  # of a draft model
        loss = drafts.cross_entropy
        if drafts.is_rejected.any():
            accepted = drafts.acceptance[drafts.is_rejected]
            # Where nothing would be accepted, the gradient must stay finite.
            loss = loss - (accepted + 1e-4).log().mean()
        return loss


def learn_from_traffic(
    target: str,
    work: Path,
    folder: Path,
    settings: HeadSettings,
    budget: Budget,
    seed: int = 0,
) -> Learned | None:
    """Train on from the drafter that the settings name, and write the new one as FOLDER@HASH.

    work: where the target's own answers are, or are drawn.  Returns None in all processes but the
    main one.  Raises ConfigError for traffic or a drafter of another target, and where the new one
    would accept less.
    """
    source = resolve(target)
    origin = origin_of(source)
    known, held = list[GeneratedAnswer](), dict[str, Sequence[GeneratedAnswer]]()
    if settings.from_traffic:
        known, held["traffic"] = split(settings.from_traffic, origin)
    current = resolve(settings.starts_from)
    made_for = folder_made_for(current)
    if not made_for.fits(target_of(target)):
        raise ConfigError(f"--starts-from {current}: it was made for {made_for}, not for {target}")
    num_tokens = sum(len(each.token_ids) for each in known)
    wanted = round(num_tokens * settings.mix / (1.0 - settings.mix))
    if wanted or not settings.from_traffic:
        most = min(wanted or settings.num_answer_tokens, settings.num_answer_tokens)
        draw_shards(source, work / "answers", most, seed, settings.answers)
        originals, held["originals"] = known_and_held_out(work / "answers", PHASE.length - 2)
        known = [*known, *_so_many(originals, wanted)] if wanted else originals
    torch.manual_seed(seed)
    learner = load_drafter(current, origin, settings.weights)
    before = _measured(learner, held)
    if settings.vocab_size:
        network = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        learner = with_vocabulary(learner, known, network, settings.vocab_size)
    loss = TrafficLoss if settings.loss == "acceptance" else HeadLoss
    order = HeadOrder(known, learner.vocabulary, seed)
    learn(loss(learner), order, budget, _LATER_RATES, seed)
    if not processes().is_main_process:
        return None
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    learner.save(unfinished, target_of(target))
    # What is written is measured: rounding the weights is part of it.
    after = _measured(load_drafter(unfinished, origin, settings.weights), held)
    try:
        _check(before, after)
    except ConfigError:
        shutil.rmtree(unfinished)
        raise
    finished = folder.with_name(f"{folder.name}@{model_hash(unfinished)[:_HASH_DIGITS]}")
    shutil.rmtree(finished, ignore_errors=True)
    unfinished.replace(finished)
    return Learned(finished, num_tokens, before, after)


@torch.no_grad()
def with_vocabulary(
    learner: DraftModelLearner,
    answers: Sequence[GeneratedAnswer],
    target: PreTrainedModel,
    size: int,
) -> DraftModelLearner:
    """The draft model with the vocabulary that these answers need most.  A token that it could not
    write begins with the target's embedding."""
    old = learner.vocabulary
    vocabulary = frequent_vocabulary(answers, target, size, old.tokenizer_hash)
    network = smaller_copy(target, vocabulary, learner.network.config.num_hidden_layers)
    _, mine, theirs = np.intersect1d(vocabulary.target_ids, old.target_ids, return_indices=True)
    ends = learner.network.get_input_embeddings(), learner.network.get_output_embeddings()
    by_token = {id(end.weight) for end in ends if end is not None}
    fresh = dict(network.named_parameters())
    for name, weight in learner.network.named_parameters():
        begun = fresh.get(name)
        if begun is None or begun.shape[1:] != weight.shape[1:]:
            raise ConfigError(
                "--vocab-size: the drafter's layers are none of the target's; leave it out"
            )
        if id(weight) in by_token:
            begun[mine] = weight[theirs]
        else:
            begun.copy_(weight)
    return DraftModelLearner(network, vocabulary, learner.weights)


def load_drafter(folder: Path, origin: Origin, weights: str = "") -> DraftModelLearner:
    """The draft model in a folder, to be trained on.  weights: as of `DraftModelLearner`, "" = as
    it is written there."""
    config = AutoConfig.from_pretrained(folder)
    vocabulary = load_draft_vocabulary(folder)
    if vocabulary is None:
        ids = np.arange(origin.vocab_size, dtype=np.int32)
        vocabulary = DraftVocabulary(ids, ids, origin.tokenizer_hash)
    if vocabulary.tokenizer_hash != origin.tokenizer_hash or (
        len(vocabulary.target_ids) != config.vocab_size
    ):
        raise ConfigError(f"{folder}: its vocabulary is not the target's; start from another one")
    state = load_int8(folder)
    if state is None:
        network: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        kind = getattr(transformers, config.architectures[0])
        network = kind.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
    written = "int8" if is_int8(folder) else WEIGHTS[0]
    return DraftModelLearner(network.train(), vocabulary, weights or written)


def _measured(
    learner: DraftModelLearner, held: dict[str, Sequence[GeneratedAnswer]]
) -> dict[str, HeldOut]:
    """By what the answers are; empty in all processes but the main one."""
    if not processes().is_main_process:
        return {}
    return {name: evaluate(learner, learner.vocabulary, answers) for name, answers in held.items()}


def _check(before: dict[str, HeldOut], after: dict[str, HeldOut]) -> None:
    for name, earlier in before.items():
        was, now = earlier.acceptance, after[name].acceptance
        if now < was * (1.0 - _LARGEST_FALL):
            raise ConfigError(
                f"acceptance on held-out {name} would fall from {was:.4f} to {now:.4f}, by more "
                f"than {_LARGEST_FALL:.0%}; nothing is written: record more, or give another --mix "
                "or more time"
            )


def origin_of(target: Path) -> Origin:
    """What answers of the model in a folder say of it."""
    vocab_size = AutoConfig.from_pretrained(target).vocab_size
    return Origin(model_hash(target), folder_tokenizer_hash(target), vocab_size)


def split(folder: Path, origin: Origin) -> tuple[list[GeneratedAnswer], list[GeneratedAnswer]]:
    """The answers to learn from, and those to every 20th prompt, which are kept out of training."""
    recorded = read_folder(folder, origin)
    prompts = list(dict.fromkeys(each.prompt.tobytes() for each in recorded))
    kept_out = set(prompts[::HELD_OUT])
    known, held_out = list[GeneratedAnswer](), list[GeneratedAnswer]()
    for each in recorded:
        (held_out if each.prompt.tobytes() in kept_out else known).append(_fitting(each))
    if not known:
        raise ConfigError(f"{folder}: {len(prompts)} prompts are too few; record more")
    return known, held_out


def _fitting(recorded: RecordedAnswer) -> GeneratedAnswer:
    """An answer as training reads it: of a long prompt its end."""
    room = max(PHASE.length - len(recorded.token_ids), PHASE.length // 2)
    return GeneratedAnswer(
        recorded.prompt[-room:],
        recorded.token_ids,
        recorded.candidates,
        recorded.log_probs,
        rejected=recorded.first_rejected,
    )


def _so_many(answers: Sequence[GeneratedAnswer], num_tokens: int) -> list[GeneratedAnswer]:
    """Answers of so many tokens together, some of them twice if there are fewer."""
    found: list[GeneratedAnswer] = []
    for answer in itertools.cycle(answers):
        if num_tokens <= 0:
            return found
        found.append(answer)
        num_tokens -= len(answer.token_ids)
    return found
