"""Distils the drafters: a general one on a mixture, then one per task."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from cluster.engine.device import computes
from cluster.errors import ConfigError
from cluster.models.made_for import write_made_for
from cluster.train.corpus import KINDS
from cluster.train.dataset import STREAMS, Mixture, mix_streams, read_streams, read_tokenizer
from cluster.train.distill import DistillationLoss, Loss
from cluster.train.generate import Sampling, chat_prompts, corpus_prompts, generate_stream
from cluster.train.made_for import target_of
from cluster.train.networks import DRAFTER, build, load, save
from cluster.train.optimizer import Rates
from cluster.train.processes import processes
from cluster.train.tokenizer import ASSISTANT, END, END_OF_TEXT
from cluster.train.trainer import (
    Budget,
    LanguageLoss,
    Phase,
    Trainer,
    TrainSettings,
    window_orders,
)

log = logging.getLogger(__name__)

DRAFTER_PHASES = (Phase(0.0, 512, 4), Phase(0.85, 1024, 2))
TOKENS_PER_STEP = 4096
PROMPT_LEN = 64
NEW_TOKENS = 192
# Half of the target's own text is greedy, half is sampled at a usual chat temperature.
TEMPERATURES = (0.0, 0.8)
GENERATED_PREFIX = "generated-"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The data and settings that one drafter is trained with."""

    name: str
    mixture: Mixture
    rates: Rates
    # None trains on the text alone, without a target: cheap, and good enough for a start.
    loss: Loss | None = "kl"
    # The recipe whose trained network this one starts from.
    starts_from: str | None = None

    def folder(self, work: Path, models: Path) -> Path:
        """The folder of the trained network; in `work` if other recipes only start from it."""
        return (models if self.loss else work) / self.name


# The learning rate of the start hardly decays, because distillation continues from it.
_BEGINNING_RATES = Rates(muon=0.02, adamw=0.004, warmup=0.02, decay=0.1)
_GENERAL_RATES = Rates(muon=0.02, adamw=0.004, warmup=0.02, decay=0.7)
_TASK_RATES = Rates(muon=0.006, adamw=0.0012, warmup=0.05, decay=0.95)

RECIPES = (
    Recipe(
        "draft-beginning",
        (("code", 1.0), ("prose", 1.0), ("chat", 1.0)),
        _BEGINNING_RATES,
        loss=None,
    ),
    Recipe(
        "demo-draft",
        (
            ("code", 0.2),
            ("prose", 0.2),
            ("chat", 0.5),
            ("generated-code", 2.0),
            ("generated-prose", 2.0),
            ("generated-chat", 2.0),
        ),
        _GENERAL_RATES,
        starts_from="draft-beginning",
    ),
    Recipe(
        "demo-draft-code",
        (("code", 0.1), ("generated-code", 2.0)),
        _TASK_RATES,
        starts_from="demo-draft",
    ),
    Recipe(
        "demo-draft-prose",
        (("prose", 0.1), ("generated-prose", 2.0)),
        _TASK_RATES,
        starts_from="demo-draft",
    ),
)


def recipe_named(name: str) -> Recipe:
    """The recipe with that name; raises ConfigError if there is none."""
    for recipe in RECIPES:
        if recipe.name == name:
            return recipe
    known = ", ".join(item.name for item in RECIPES)
    raise ConfigError(f"{name}: no such drafter; choose one of {known}, or name its --target")


def generate_streams(
    work: Path,
    target_folder: Path,
    num_tokens: int,
    seed: int = 0,
    streams: Sequence[str] = STREAMS,
) -> dict[str, int]:
    """Let the target continue training prompts: `num_tokens` of code and prose, a third of chat."""
    tokenizer = read_tokenizer(target_folder)
    network = load(target_folder)
    if computes(torch.bfloat16, network.device):
        network = network.to(torch.bfloat16)
    sampling = Sampling(NEW_TOKENS, stop_ids(tokenizer), TEMPERATURES)
    sizes: dict[str, int] = {}
    for name in streams:
        (stream,) = read_streams(work / "data", [name])
        if name in KINDS:
            prompts = corpus_prompts(stream, PROMPT_LEN, seed)
            wanted = num_tokens
        else:
            end_id, assistant_id = tokenizer.convert_tokens_to_ids([END_OF_TEXT, ASSISTANT])
            prompts = chat_prompts(stream, assistant_id, end_id, seed)
            wanted = num_tokens // 3
        drawn = generate_stream(network, prompts, sampling, wanted, seed)
        np.save(work / "data" / f"{GENERATED_PREFIX}{name}.npy", drawn)
        sizes[name] = len(drawn)
        log.info("generated stream=%s tokens=%s", name, len(drawn))
    return sizes


def train_drafter(work: Path, models: Path, recipe: Recipe, budget: Budget, seed: int = 0) -> None:
    """Train one drafter in `work`, or resume its training, and save it in its folder."""
    tokenizer = read_tokenizer(work / "data")
    torch.manual_seed(seed)
    if recipe.starts_from is None:
        end_id = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        network = build(DRAFTER, end_of_text_id=end_id)
    else:
        network = load(recipe_named(recipe.starts_from).folder(work, models))
    if recipe.loss is None:
        objective: nn.Module = LanguageLoss(network)
    else:
        objective = DistillationLoss(network, load(models / "demo-target"), recipe.loss)
    settings = TrainSettings(
        budget, DRAFTER_PHASES, TOKENS_PER_STEP, seed, recipe.rates, compiles=True
    )
    trainer = Trainer(
        objective,
        window_orders(mix_streams(work / "data", recipe.mixture), settings),
        settings,
        checkpoint=work / f"{recipe.name}.pt",
    )
    trainer.resume()
    trainer.run()
    if processes().is_main_process:
        folder = recipe.folder(work, models)
        save(network, tokenizer, folder)
        if recipe.loss is not None:
            write_made_for(folder, target_of(str(models / "demo-target")))


def stop_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The tokens that end an answer."""
    return tuple(tokenizer.convert_tokens_to_ids([END_OF_TEXT, END]))
