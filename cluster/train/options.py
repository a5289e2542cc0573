"""The options that several verbs of `drafthouse train` have."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.train.trainer import Budget


def add_folders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--work", type=Path, default=Path("train-work"), help="streams, checkpoints, interim models"
    )
    # The default is not the published folder, which training must not overwrite by accident.
    parser.add_argument(
        "--models", type=Path, default=Path("train-work/models"), help="finished models"
    )
    parser.add_argument("--seed", type=int, default=0)


def add_training(parser: argparse.ArgumentParser) -> None:
    """How long a network is trained, and by how many processes."""
    parser.add_argument(
        "--processes",
        type=positive_int,
        default=1,
        help="divide each step among so many single-threaded processes on a busy CPU; several "
        "GPUs: `accelerate launch -m cluster.train ...`",
    )
    add_threads(parser)
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=positive_int, help="repeatable on one machine")
    budget.add_argument("--minutes", type=positive_float, help="as many steps as fit")


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=positive_int, help="default: one per core")


def budget(arguments: argparse.Namespace) -> Budget:
    return Budget(steps=arguments.steps, minutes=arguments.minutes)


def positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
