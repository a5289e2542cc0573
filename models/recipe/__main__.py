"""`python -m models.recipe train | bits`: makes the demonstration models, and measures the target.

`drafthouse train evaluate` compares the drafters.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch
import yaml

from cluster.errors import DrafthouseError
from cluster.options import add_options
from cluster.train.trainer import Budget
from models.recipe.demo import RECIPES, TARGET_NAME, heldout_bits, train_demo

_VERBS = yaml.safe_load(Path(__file__).with_name("options.yaml").read_text("utf-8"))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; wrong options end the process with status 2."""
    parser = argparse.ArgumentParser(prog="python -m models.recipe", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", metavar="STEP", required=True)
    names = ", ".join(recipe.name for recipe in RECIPES)
    for verb, told in _VERBS.items():
        add_options(verbs.add_parser(verb, help=told["about"]), told["options"], names=names)
    return parser.parse_args(words)


def run(arguments: argparse.Namespace) -> int:
    """Run the parsed command; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        (_train if arguments.verb == "train" else _bits)(arguments)
    except DrafthouseError as error:
        print(f"{arguments.verb}: {error}", file=sys.stderr)
        return 2
    return 0


def _train(arguments: argparse.Namespace) -> None:
    train_demo(
        arguments.work,
        arguments.models,
        arguments.names,
        Budget(steps=arguments.steps, minutes=arguments.minutes),
        arguments.processes,
        arguments.seed,
    )


def _bits(arguments: argparse.Namespace) -> None:
    folder = arguments.models / TARGET_NAME
    for kind, cost in heldout_bits(folder, arguments.max_bytes).items():
        print(f"bits per byte\t{kind}\t{cost.rate:.4f}\t{cost.num_bytes} bytes held out")


if __name__ == "__main__":
    sys.exit(run(parse()))
