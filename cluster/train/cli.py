"""`drafthouse train ...`: drafters of chat models, and the demonstration models."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from cluster.errors import DrafthouseError
from cluster.train.compare import compare, drafters_of, read_questions, table
from cluster.train.compare_cli import PUBLISHED
from cluster.train.demo import RECIPES, TARGET_NAME, heldout_bits, train_demo
from cluster.train.head_cli import HEADS, add_head, run_head
from cluster.train.layer_skip import SearchSettings, find_layer_skip
from cluster.train.options import add_folders, add_threads, add_training, budget, positive_int


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the training verbs to the parser of `drafthouse train`."""
    verbs = parser.add_subparsers(dest="train_verb", metavar="STEP", required=True)
    for kind, told in HEADS.items():
        add_head(verbs.add_parser(kind, help=told), kind)
    skip = verbs.add_parser(
        "layer-skip", help="find the layers that a target can leave out when it drafts for itself"
    )
    skip.add_argument("target", help="a folder, a hub model or one of `drafthouse models`")
    skip.add_argument("--out", type=Path, help="write the drafter's options there, as YAML")
    skip.add_argument(
        "--tokens", type=positive_int, default=SearchSettings().num_tokens,
        help="of the target's own answers that sets of layers are compared on",
    )  # fmt: skip
    skip.add_argument("--seed", type=int, default=0)
    demo = verbs.add_parser("demo", help="train the demonstration models on this machine's text")
    names = ", ".join(recipe.name for recipe in RECIPES)
    demo.add_argument("names", nargs="*", help=f"some of {names}; default: all")
    add_folders(demo)
    add_training(demo)
    evaluate = verbs.add_parser("evaluate", help="measure the demonstration models")
    evaluate.add_argument("--models", type=Path, default=PUBLISHED)
    evaluate.add_argument(
        "--questions", type=Path, default=PUBLISHED / "heldout.jsonl",
        help="that drafters are compared on: excerpts, or Spec-Bench's JSONL",
    )  # fmt: skip
    evaluate.add_argument(
        "--max-bytes", type=positive_int, help="held-out bytes of each kind (default: all)"
    )
    evaluate.add_argument(
        "--skip-bits", action="store_true", help="measure only the drafters (fast)"
    )
    for verb in (skip, evaluate):
        add_threads(verb)


def run(arguments: argparse.Namespace) -> int:
    """Run the parsed command; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if getattr(arguments, "threads", None):
        torch.set_num_threads(arguments.threads)
    verbs: dict[str, Callable[[argparse.Namespace], None]] = {
        **dict.fromkeys(HEADS, run_head),
        "layer-skip": _layer_skip,
        "demo": _demo,
        "evaluate": _evaluate,
    }
    try:
        verbs[arguments.train_verb](arguments)
    except DrafthouseError as error:
        print(f"drafthouse train {arguments.train_verb}: {error}", file=sys.stderr)
        return 2
    return 0


def main() -> int:
    """The entry of `python -m cluster.train`."""
    parser = argparse.ArgumentParser(prog="drafthouse train")
    configure(parser)
    return run(parser.parse_args())


def _demo(arguments: argparse.Namespace) -> None:
    train_demo(
        arguments.work, arguments.models, arguments.names, budget(arguments),
        arguments.processes, arguments.seed,
    )  # fmt: skip


def _evaluate(arguments: argparse.Namespace) -> None:
    folder = arguments.models / TARGET_NAME
    if not arguments.skip_bits:
        for kind, cost in heldout_bits(folder, arguments.max_bytes).items():
            print(f"bits per byte\t{kind}\t{cost.rate:.4f}\t{cost.num_bytes} bytes held out")
    questions, target = read_questions(arguments.questions), str(folder)
    print(table(compare(target, drafters_of(target, arguments.models.glob("*/")), questions)))


def _layer_skip(arguments: argparse.Namespace) -> None:
    settings = SearchSettings(num_tokens=arguments.tokens, seed=arguments.seed)
    report, options = find_layer_skip(arguments.target, settings)
    print(f"{report}\n\n{options}", end="")
    if arguments.out is not None:
        arguments.out.write_text(options)
