"""`drafthouse train ...`: every step from local text to measured models."""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from cluster.errors import DrafthouseError
from cluster.train.corpus import (
    KINDS,
    heldout_prompts,
    load_corpus,
    read_excerpts,
    write_excerpts,
)
from cluster.train.dataset import STREAMS, write_streams
from cluster.train.drafter import RECIPES, generate_streams, train_drafter
from cluster.train.drafter_cli import add_drafter, run_drafter
from cluster.train.evaluate import evaluate_acceptance, evaluate_bits, evaluate_divergence
from cluster.train.head_cli import HEADS, add_head, run_head
from cluster.train.layer_skip import SearchSettings, find_layer_skip
from cluster.train.options import (
    add_folders,
    add_threads,
    add_training,
    budget,
    positive_float,
    positive_int,
)
from cluster.train.processes import run_together
from cluster.train.target import train_target
from cluster.train.tokenizer import train_tokenizer
from cluster.train.trainer import Budget

# Shares of the minutes of `all`: the target, then the recipes in their order.
_TARGET_SHARE = 0.6
_RECIPE_SHARES = (0.12, 0.14, 0.07, 0.07)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the training verbs to the parser of `drafthouse train`."""
    verbs = parser.add_subparsers(dest="train_verb", metavar="STEP", required=True)
    corpus = verbs.add_parser("corpus", help="report the size of this machine's corpus")
    corpus.add_argument("--excerpts", type=Path, help="also write held-out excerpts to this file")
    corpus.add_argument("--count", type=positive_int, default=60, help="excerpts of each kind")
    corpus.add_argument("--seed", type=int, default=0)
    tokenizer = verbs.add_parser("tokenizer", help="train the tokenizer and encode the corpus")
    add_folders(tokenizer)
    target = verbs.add_parser("target", help="train the target, or continue its training")
    add_folders(target)
    add_training(target)
    generate = verbs.add_parser(
        "generate", help="generate text with the target to train its drafters on"
    )
    add_folders(generate)
    generate.add_argument("--tokens", type=positive_int, default=300_000, help="per kind")
    generate.add_argument(
        "--streams", nargs="+", choices=STREAMS, default=list(STREAMS), help="default: all"
    )
    drafter = verbs.add_parser("drafter", help="distil one drafter from the target")
    add_drafter(drafter)
    for kind, told in HEADS.items():
        add_head(verbs.add_parser(kind, help=told), kind)
    evaluate = verbs.add_parser("evaluate", help="measure the models on held-out text")
    evaluate.add_argument("--models", type=Path, default=Path("models"))
    evaluate.add_argument("--excerpts", type=Path, default=Path("models/heldout.jsonl"))
    evaluate.add_argument(
        "--max-bytes", type=positive_int, help="held-out bytes of each kind (default: all)"
    )
    evaluate.add_argument(
        "--skip-bits", action="store_true", help="measure only the drafters (fast)"
    )
    evaluate.add_argument(
        "--prompts",
        type=positive_int,
        help="draw this many held-out prompts of each kind instead of reading the excerpts",
    )
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
    everything = verbs.add_parser("all", help="every step, in order")
    add_folders(everything)
    everything.add_argument("--minutes", type=positive_float, default=110.0)
    for verb in (generate, evaluate, skip, everything):
        add_threads(verb)


def run(arguments: argparse.Namespace) -> int:
    """Run the parsed command; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if getattr(arguments, "threads", None):
        torch.set_num_threads(arguments.threads)
    verbs: dict[str, Callable[[argparse.Namespace], None]] = {
        "corpus": _corpus,
        "tokenizer": _tokenizer,
        "target": _target,
        "generate": _generate,
        "drafter": run_drafter,
        "eagle3": run_head,
        "medusa": run_head,
        "early-exit": run_head,
        "evaluate": _evaluate,
        "layer-skip": _layer_skip,
        "all": _all,
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


def _corpus(arguments: argparse.Namespace) -> None:
    corpus = load_corpus()
    for part, documents in (("train", corpus.train), ("heldout", corpus.heldout)):
        counts = Counter(item.source for item in documents)
        num_bytes: Counter[str] = Counter()
        for item in documents:
            num_bytes[item.source] += len(item.text.encode())
        for source in sorted(counts):
            print(f"{part}\t{source}\t{counts[source]} documents\t{num_bytes[source]} bytes")
    print(f"dropped\t{corpus.num_duplicates} duplicates")
    if arguments.excerpts is not None:
        excerpts = [
            excerpt
            for kind in KINDS
            for excerpt in heldout_prompts(kind, arguments.count, arguments.seed)
        ]
        write_excerpts(excerpts, arguments.excerpts)


def _tokenizer(arguments: argparse.Namespace) -> None:
    corpus = load_corpus()
    tokenizer = train_tokenizer(document.text for document in corpus.train)
    sizes = write_streams(corpus, tokenizer, arguments.work / "data", arguments.seed)
    for name, size in sizes.items():
        print(f"{name}\t{size} tokens")


def _target(arguments: argparse.Namespace) -> None:
    run_together(
        arguments.processes,
        train_target,
        arguments.work,
        arguments.models / "demo-target",
        budget(arguments),
        arguments.seed,
    )


def _generate(arguments: argparse.Namespace) -> None:
    sizes = generate_streams(
        arguments.work,
        arguments.models / "demo-target",
        arguments.tokens,
        arguments.seed,
        arguments.streams,
    )
    for name, size in sizes.items():
        print(f"generated {name}\t{size} tokens")


def _evaluate(arguments: argparse.Namespace) -> None:
    costs = (
        {}
        if arguments.skip_bits
        else evaluate_bits(arguments.models / "demo-target", arguments.max_bytes)
    )
    for text, cost in costs.items():
        print(f"bits per byte\t{text}\t{cost.rate:.4f}\t{cost.num_bytes} bytes held out")
    if arguments.prompts is None:
        excerpts = read_excerpts(arguments.excerpts)
    else:
        excerpts = tuple(
            excerpt
            for kind in KINDS
            for excerpt in heldout_prompts(kind, arguments.prompts, seed=1)
        )
    for what, reports in (
        ("nats from the target's distribution", evaluate_divergence(arguments.models, excerpts)),
        ("mean acceptance length", evaluate_acceptance(arguments.models, excerpts)),
    ):
        for report in reports:
            value, lead = report.value, report.lead
            print(
                f"{what}\t{report.kind}\t{report.drafter}\t{value.mean:.3f} "
                f"[{value.low:.3f}, {value.high:.3f}]\tlead over the general drafter "
                f"{lead.mean:+.3f} [{lead.low:+.3f}, {lead.high:+.3f}]\t{report.num_texts} texts"
            )


def _layer_skip(arguments: argparse.Namespace) -> None:
    settings = SearchSettings(num_tokens=arguments.tokens, seed=arguments.seed)
    report, options = find_layer_skip(arguments.target, settings)
    print(f"{report}\n\n{options}", end="")
    if arguments.out is not None:
        arguments.out.write_text(options)


def _all(arguments: argparse.Namespace) -> None:
    work, models, seed, minutes = (
        arguments.work,
        arguments.models,
        arguments.seed,
        arguments.minutes,
    )
    _tokenizer(arguments)
    train_target(work, models / "demo-target", Budget(minutes=minutes * _TARGET_SHARE), seed)
    generate_streams(work, models / "demo-target", 300_000, seed)
    for recipe, share in zip(RECIPES, _RECIPE_SHARES, strict=True):
        train_drafter(work, models, recipe, Budget(minutes=minutes * share), seed)
