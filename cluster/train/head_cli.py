"""`drafthouse train drafter | eagle3 | medusa | early-exit`."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.train.chat_heads import LOSSES, WEIGHTS, HeadSettings
from cluster.train.compare_cli import add_evaluate, questions_of, show_comparison
from cluster.train.heads import train_head
from cluster.train.options import (
    add_folders,
    add_training,
    budget,
    positive_int,
)
from cluster.train.processes import processes, run_together
from cluster.train.trainer import Budget

HEADS = {
    "drafter": "distil a small draft model of a chat model from its own answers",
    "eagle3": "train an EAGLE-3 head on a chat model's own answers",
    "medusa": "train Medusa heads on a chat model's own answers",
    "early-exit": "train an exit between a chat model's layers on its own answers",
}
# A draft model chooses among more tokens than a head, which is a smaller part of it.
_DRAFTER_VOCAB_SIZE = 10_240


def add_head(parser: argparse.ArgumentParser, kind: str) -> None:
    """How a drafter of HEADS is trained on a chat model's own answers."""
    defaults, is_model = HeadSettings(), kind == "drafter"
    add = parser.add_argument
    add("name", help="the folder of the new drafter")
    add(
        "--target",
        required=True,
        help="the chat model: a folder, a hub model or one of `drafthouse models`",
    )
    add("--depth", type=positive_int, default=defaults.depth, help="drafts in a chain, or heads")
    if is_model:
        add("--layers", type=positive_int, default=defaults.num_layers, help="of the target")
        add("--weights", choices=WEIGHTS, default=defaults.weights, help="how they are written")
    if kind == "early-exit":
        add("--exit-layer", type=positive_int, help="layers that run; default: half of them")
    size = _DRAFTER_VOCAB_SIZE if is_model else defaults.vocab_size
    add("--vocab-size", type=positive_int, default=size, help="tokens it drafts")
    add("--loss", choices=LOSSES, default=defaults.loss)
    add(
        "--answer-tokens",
        type=positive_int,
        default=defaults.num_answer_tokens,
        help="tokens of answers that the target writes first",
    )
    add_folders(parser)
    add_training(parser)
    add_evaluate(parser)


def run_head(arguments: argparse.Namespace) -> None:
    """Train a drafter, say how it does, and compare it with others if asked."""
    questions, kind = questions_of(arguments), arguments.train_verb
    defaults = HeadSettings()
    settings = HeadSettings(
        arguments.depth, arguments.vocab_size, arguments.loss, arguments.answer_tokens,
        exit_layer=getattr(arguments, "exit_layer", None) or 0,
        num_layers=getattr(arguments, "layers", defaults.num_layers),
        weights=getattr(arguments, "weights", defaults.weights),
    )  # fmt: skip
    run_together(
        arguments.processes,
        _train_head,
        kind,
        arguments.target,
        arguments.work / arguments.name if kind == "drafter" else arguments.work,
        arguments.models / arguments.name,
        settings,
        budget(arguments),
        arguments.seed,
    )
    show_comparison(arguments, arguments.target, questions)


def _train_head(
    kind: str,
    target: str,
    work: Path,
    folder: Path,
    settings: HeadSettings,
    budget: Budget,
    seed: int,
) -> None:
    """In each process of the training."""
    found = train_head(kind, target, work, folder, settings, budget, seed)
    if processes().is_main_process:
        print(f"held-out answers\t{found.num_answers}")
        for depth, (loss, agreement) in enumerate(
            zip(found.loss_nats, found.agreement, strict=True), 1
        ):
            print(f"draft {depth}\t{loss:.3f} nats per token\tagreement {agreement:.3f}")
        print(f"mean acceptance length of greedy chains of {settings.depth}\t{found.chain_len:.3f}")
        print(f"the target's probability inside the draft vocabulary\t{found.coverage:.3f}")
