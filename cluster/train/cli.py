"""`drafthouse train ...`: drafters of chat models."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch
import yaml

from cluster.errors import ConfigError, DrafthouseError, reason_of
from cluster.models.names import REPOSITORY
from cluster.options import add_options
from cluster.train.chat_heads import HeadSettings
from cluster.train.compare import Questions, compare, drafters_of, read_questions, table
from cluster.train.layer_skip import find_layer_skip
from cluster.train.runs import learn_from_traffic, train_head
from cluster.train.trainer import Budget, processes, run_together

_VERBS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
# The models of this repository, and texts that none of them has learned.
PUBLISHED = REPOSITORY / "models"
_HELD_OUT = PUBLISHED / "heldout.jsonl"
# A draft model chooses among more tokens than a head, which is a smaller part of it.
_DRAFTER_VOCAB_SIZE = 10_240


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the training verbs to the parser of `drafthouse train`."""
    verbs = parser.add_subparsers(dest="train_verb", metavar="STEP", required=True)
    for verb, told in _VERBS.items():
        add_options(verbs.add_parser(verb, help=told["about"]), told["options"])
    # It is gone, which is said whatever options follow: none of them begins like one of its own.
    verbs.add_parser("demo", add_help=False, prefix_chars="\0").add_argument("given", nargs="*")


def run(arguments: argparse.Namespace) -> int:
    """Run the parsed command; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if getattr(arguments, "threads", None):
        torch.set_num_threads(arguments.threads)
    verbs: dict[str, Callable[[argparse.Namespace], None]] = {
        "layer-skip": _layer_skip,
        "evaluate": _evaluate,
        "demo": _demo,
    }
    try:
        verbs.get(arguments.train_verb, _head)(arguments)
    except DrafthouseError as error:
        print(f"drafthouse train {arguments.train_verb}: {error}", file=sys.stderr)
        return 2
    return 0


def main() -> int:
    """The entry of `python -m cluster.train`."""
    parser = argparse.ArgumentParser(prog="drafthouse train")
    configure(parser)
    return run(parser.parse_args())


def _head(arguments: argparse.Namespace) -> None:
    """Train a drafter, say how it does, and compare it with others if asked."""
    given = {each.name: getattr(arguments, each.name, None) for each in fields(HeadSettings)}
    settings = HeadSettings(**{name: value for name, value in given.items() if value is not None})
    if settings.loss and not settings.from_traffic:
        raise ConfigError(
            f"--loss {settings.loss}: this option is gone but for --from-traffic; drafters learn "
            "by kl, so leave it out"
        )
    questions, kind = questions_of(arguments), arguments.train_verb
    for option in ("models", "work"):
        folder = getattr(arguments, option)
        try:  # before anything is trained
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--{option}: {folder} cannot be made ({reason_of(error)}); name another"
            ) from error
    if kind == "drafter":
        answers = replace(settings.answers, system_prompt=arguments.system_prompt)
        size = arguments.vocab_size or (0 if settings.starts_from else _DRAFTER_VOCAB_SIZE)
        settings = replace(settings, answers=answers, vocab_size=size)
    goes_on = settings.from_traffic or settings.starts_from
    if goes_on:
        if not settings.starts_from:
            raise ConfigError(
                "--from-traffic: give --starts-from too, the drafter that goes on learning"
            )
        if arguments.num_layers:
            raise ConfigError(f"--layers: those of {settings.starts_from} stay; leave it out")
        settings = replace(settings, weights=arguments.weights or "")
    run_together(
        arguments.processes, _learn_from_traffic if goes_on else _train_head, arguments, settings
    )
    show_comparison(arguments, questions)


def _train_head(arguments: argparse.Namespace, settings: HeadSettings) -> None:
    """In each process of the training."""
    kind, work = arguments.train_verb, arguments.work
    found = train_head(
        kind,
        arguments.target,
        # A draft model's answers are drawn without hidden rows; all heads share theirs.
        work / arguments.name if kind == "drafter" else work,
        arguments.models / arguments.name,
        settings,
        Budget(arguments.steps, arguments.minutes),
        arguments.seed,
    )
    if not processes().is_main_process:
        return
    print(f"held-out answers\t{found.num_answers}")
    for depth, figures in enumerate(zip(found.loss_nats, found.agreement, strict=True), 1):
        loss, agreement = figures
        print(f"draft {depth}\t{loss:.3f} nats per token\tagreement {agreement:.3f}")
    print(f"mean acceptance length of greedy chains of {settings.depth}\t{found.chain_len:.3f}")
    print(f"the target's probability inside the draft vocabulary\t{found.coverage:.3f}")


def _learn_from_traffic(arguments: argparse.Namespace, settings: HeadSettings) -> None:
    """In each process of the training."""
    found = learn_from_traffic(
        arguments.target,
        arguments.work / arguments.name,
        arguments.models / arguments.name,
        settings,
        Budget(arguments.steps, arguments.minutes),
        arguments.seed,
    )
    if found is None:
        return
    if found.num_tokens:
        print(f"recorded tokens that it learned from\t{found.num_tokens}")
    for name, before in found.before.items():
        after = found.after[name]
        print(
            f"held-out {name}\t{before.num_answers} answers\t"
            f"acceptance {before.acceptance:.4f} -> {after.acceptance:.4f}\t"
            f"excess {before.excess_nats:.4f} -> {after.excess_nats:.4f} nats per token"
        )
    print(f"written\t{found.folder}")


def questions_of(arguments: argparse.Namespace) -> Questions | None:
    """The questions that drafters are to be compared on; None = they are not compared."""
    asked = arguments.evaluate
    return None if asked is None else read_questions(Path(asked or _HELD_OUT))


def show_comparison(arguments: argparse.Namespace, questions: Questions | None) -> None:
    """Print how the drafters in --models and the published ones do, in the main process."""
    if questions is None or not processes().is_main_process:
        return
    folders = [*PUBLISHED.glob("*/"), *arguments.models.glob("*/")]
    target = arguments.target
    print(table(compare(target, drafters_of(target, folders), questions)))


def _evaluate(arguments: argparse.Namespace) -> None:
    if arguments.skip_bits or arguments.max_bytes:
        raise ConfigError(
            "--skip-bits, --max-bytes: these options are gone, so leave them out; bits per byte "
            "of the demonstration's target are measured in a checkout, by "
            "`python -m models.recipe bits`"
        )
    if arguments.target is None:
        raise ConfigError("--target: name the model whose drafters are compared")
    show_comparison(arguments, questions_of(arguments))


def _demo(arguments: argparse.Namespace) -> None:
    raise ConfigError(
        "this step is gone; in a checkout `make train` makes the demonstration models, or "
        "`python -m models.recipe train`"
    )


def _layer_skip(arguments: argparse.Namespace) -> None:
    report, options = find_layer_skip(arguments.target, arguments.tokens, arguments.seed)
    print(f"{report}\n\n{options}", end="")
    if arguments.out is not None:
        arguments.out.write_text(options)
