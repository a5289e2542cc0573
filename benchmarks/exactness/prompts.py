"""The prompts of the exactness benchmarks: token ids for the model that a configuration serves."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.spec_bench.questions import limit, load
from benchmarks.support.options import add_options
from benchmarks.support.prompts import heldout
from cluster.config.file import load as load_config
from cluster.config.schema import Config
from cluster.models.resolve import resolve

_LEN_RANGE = (5, 1500)  # tokens of the held-out prompts


def add_prompt_options(parser: argparse.ArgumentParser, count: int) -> None:
    parser.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help="a file in Spec-Bench's form; default: the held-out text of models/",
    )
    parser.add_argument(
        "--questions-per-category", type=int, metavar="N", help="of the file; default: all"
    )
    add_options(
        parser,
        prompts=(count, "of the held-out text"),
    )


def config_of(arguments: argparse.Namespace) -> Config:
    return load_config(arguments.config, arguments.overrides).config


def model_folder(arguments: argparse.Namespace) -> Path:
    """The folder of the target that the configuration serves."""
    return resolve(config_of(arguments).target.engine.model)


def prompts_of(arguments: argparse.Namespace, tokenizer: Any, max_len: int) -> list[list[int]]:
    """The first turns of the questions in the model's chat template, or held-out text.

    max_len: of a held-out prompt; questions are whole.
    """
    if arguments.questions is None:
        least, most = _LEN_RANGE
        half = arguments.prompts // 2
        prompts = heldout("code", half, tokenizer, least, min(most, max_len))
        return prompts + heldout(
            "prose", arguments.prompts - half, tokenizer, least, min(most, max_len)
        )
    questions = limit(load(arguments.questions), arguments.questions_per_category)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question.turns[0]}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for question in questions
    ]
    return [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
