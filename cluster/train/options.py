"""The options of `drafthouse train`, each told once; a verb adds those that it has."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.models.catalogue import REPOSITORY
from cluster.options import new_file, positive, seed, share, whole
from cluster.train.chat_heads import WEIGHTS
from cluster.train.layer_skip import SearchSettings
from cluster.train.traffic import LOSSES

# The models of this repository.
PUBLISHED = REPOSITORY / "models"

FOLDERS = ("--work", "--models", "--seed")
_BUDGET = ("--steps", "--minutes")


# As argparse takes them.  What has no default here has that of its settings.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--target": {
        "required": True,
        "help": "the chat model: a folder, a hub model or one of `drafthouse models`",
    },
    "--depth": {"type": whole(), "help": "drafts in a chain, or heads"},
    "--layers": {"dest": "num_layers", "type": whole(), "help": "of the target"},
    "--weights": {"choices": WEIGHTS, "help": "how they are written"},
    "--tokenizer": {
        "metavar": "MODEL",
        "help": "draft in all tokens of this model instead of the target's",
    },
    "--system-prompt": {
        "metavar": "TEXT",
        "default": "",
        "help": "of the task: stands before every question that the target asks itself",
    },
    "--exit-layer": {"type": whole(), "help": "layers that run; default: half of them"},
    "--vocab-size": {"type": whole(), "help": "tokens it drafts"},
    "--answer-tokens": {
        "dest": "num_answer_tokens",
        "type": whole(),
        "help": "tokens of answers that the target writes first",
    },
    "--work": {
        "type": Path,
        "default": Path("train-work"),
        "help": "streams, checkpoints, interim models",
    },
    # The default is not the published folder, which training must not overwrite by accident.
    "--models": {"type": Path, "default": Path("train-work/models"), "help": "finished models"},
    "--seed": {"type": seed, "default": 0},
    "--processes": {
        "type": whole(),
        "default": 1,
        "help": "divide each step among so many "
        "single-threaded processes on a busy CPU; several GPUs: `accelerate launch -m "
        "cluster.train ...`",
    },
    "--threads": {"type": whole(), "help": "default: one per core"},
    "--steps": {"type": whole(), "help": "repeatable on one machine"},
    "--minutes": {"type": positive(), "help": "as many steps as fit"},
    "--evaluate": {
        "nargs": "?",
        "type": Path,
        "const": PUBLISHED / "heldout.jsonl",
        "metavar": "QUESTIONS",
        "help": "afterwards compare the target's drafters, by depth and task, on held-out text or "
        "on questions as Spec-Bench's JSONL has them",
    },
    "--from-traffic": {
        "type": Path,
        "metavar": "DIR",
        "help": "learn from served answers that a recorder has "
        "kept, beside those that the target writes first; see docs/learning.md",
    },
    "--starts-from": {
        "metavar": "CURRENT",
        "help": "the drafter that goes on learning, and is not made anew",
    },
    "--mix": {
        "type": share,
        "default": 0.5,
        "help": "with --from-traffic: the share of answers to "
        "questions that the target asks itself, against forgetting",
    },
    "--loss": {"choices": LOSSES, "help": "with --from-traffic; see docs/learning.md"},
    "--out": {"type": new_file, "help": "write the drafter's options there, as YAML"},
    "--tokens": {
        "type": whole(),
        "default": SearchSettings().num_tokens,
        "help": "of the target's own answers that sets of layers are compared on",
    },
    "--questions": {
        "type": Path,
        "default": PUBLISHED / "heldout.jsonl",
        "help": "that drafters are compared on: excerpts, or Spec-Bench's JSONL",
    },
    "--max-bytes": {"type": whole(), "help": "held-out bytes of each kind (default: all)"},
    "--skip-bits": {"action": "store_true", "help": "measure only the drafters (fast)"},
}


def add(parser: argparse.ArgumentParser, *names: str) -> None:
    """Let a verb have these options."""
    for name in names:
        parser.add_argument(name, **_OPTIONS[name])


def add_training(parser: argparse.ArgumentParser) -> None:
    """How long a network is trained, and by how many processes."""
    add(parser, "--processes", "--threads")
    budget = parser.add_mutually_exclusive_group(required=True)
    for name in _BUDGET:
        budget.add_argument(name, **_OPTIONS[name])
