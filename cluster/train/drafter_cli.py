"""`drafthouse train drafter`."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.train.chat_drafter import WEIGHTS, ChatDrafterSettings, train_chat_drafter
from cluster.train.compare_cli import add_evaluate, questions_of, show_comparison
from cluster.train.drafter import RECIPES, recipe_named, train_drafter
from cluster.train.options import (
    add_folders,
    add_training,
    budget,
    positive_int,
)
from cluster.train.processes import processes, run_together
from cluster.train.trainer import Budget


def add_drafter(parser: argparse.ArgumentParser) -> None:
    """How a drafter is distilled, from the demonstration target or from any chat model."""
    parser.add_argument(
        "name",
        help="a demonstration drafter, one of "
        f"{', '.join(recipe.name for recipe in RECIPES)}; with --target the folder of a new one",
    )
    add_folders(parser)
    add_training(parser)
    add_evaluate(parser)
    defaults = ChatDrafterSettings()
    add = parser.add_argument_group("a drafter of any chat model").add_argument
    add("--target", help="the chat model: a folder, a hub model or one of `drafthouse models`")
    add("--layers", type=positive_int, default=defaults.num_layers, help="of the target")
    add("--vocab-size", type=positive_int, default=defaults.vocab_size, help="tokens it writes")
    add(
        "--answer-tokens",
        type=positive_int,
        default=defaults.num_answer_tokens,
        help="tokens of answers that the target writes first",
    )
    add("--weights", choices=WEIGHTS, default=defaults.weights, help="how they are written")


def run_drafter(arguments: argparse.Namespace) -> None:
    questions = questions_of(arguments)
    if arguments.target is None:
        target = str(arguments.models / "demo-target")
        run_together(
            arguments.processes,
            train_drafter,
            arguments.work,
            arguments.models,
            recipe_named(arguments.name),
            budget(arguments),
            arguments.seed,
        )
    else:
        target = arguments.target
        run_together(
            arguments.processes,
            _train_chat_drafter,
            target,
            arguments.work / arguments.name,
            arguments.models / arguments.name,
            ChatDrafterSettings(
                arguments.layers, arguments.vocab_size, arguments.answer_tokens, arguments.weights
            ),
            budget(arguments),
            arguments.seed,
        )
    show_comparison(arguments, target, questions)


def _train_chat_drafter(
    target: str,
    work: Path,
    folder: Path,
    settings: ChatDrafterSettings,
    budget: Budget,
    seed: int,
) -> None:
    """In each process of the training."""
    found = train_chat_drafter(target, work, folder, settings, budget, seed)
    if processes().is_main_process:
        print(f"held-out answers\t{found.num_answers}")
        print(f"loss\t{found.loss_nats:.3f} nats per token")
        print(f"agreement with the target's most likely token\t{found.agreement:.3f}")
        print(f"mean acceptance length of greedy chains of four\t{found.chain_len:.3f}")
        print(f"the target's probability inside the draft vocabulary\t{found.coverage:.3f}")
