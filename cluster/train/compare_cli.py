"""`--evaluate` of `drafthouse train drafter | eagle3 | medusa | early-exit`."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.models.catalogue import REPOSITORY
from cluster.train.compare import Questions, compare, drafters_of, read_questions, table
from cluster.train.processes import processes

# The models of this repository.
PUBLISHED = REPOSITORY / "models"


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--evaluate",
        nargs="?",
        type=Path,
        const=PUBLISHED / "heldout.jsonl",
        metavar="QUESTIONS",
        help="afterwards compare the target's drafters, by depth and task, on held-out text or on "
        "questions as Spec-Bench's JSONL has them",
    )


def questions_of(arguments: argparse.Namespace) -> Questions | None:
    """The questions that drafters are to be compared on; None = they are not compared."""
    return read_questions(arguments.evaluate) if arguments.evaluate else None


def show_comparison(
    arguments: argparse.Namespace, target: str, questions: Questions | None
) -> None:
    """Print how the drafters in --models and the published ones do, in the main process."""
    if questions is None or not processes().is_main_process:
        return
    folders = [*PUBLISHED.glob("*/"), *arguments.models.glob("*/")]
    print(table(compare(target, drafters_of(target, folders), questions)))
