"""Grammars of every kind, on the demonstration's vocabulary."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cluster.config.schema import AnswersConfig
from cluster.grammar.compiler import GrammarCompiler
from cluster.grammar.text import ConstrainedText
from cluster.models.fingerprint import load_pretrained_tokenizer
from cluster.requests.fields import GrammarSpec

FOLDER = Path(__file__).resolve().parents[3] / "models" / "demo-target"
# Wider than the tokenizer's, as padded models have it.
VOCAB_SIZE = 4096 + 40

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 20},
        "tags": {"type": "array", "items": {"const": "x"}, "maxItems": 2},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}
SPECS = {
    "json_schema": GrammarSpec("json_schema", json.dumps(SCHEMA)),
    "regex": GrammarSpec("regex", r"(ab|cd){2,4}-[0-9]{3}"),
    "choice": GrammarSpec("choice", json.dumps(["yes", 'no "or"\n', "perhaps"])),
    "lark": GrammarSpec("grammar", 'start: "a" NUMBER "b"\nNUMBER: /[0-9]{1,4}/\n'),
    "gbnf": GrammarSpec("grammar", 'root ::= "x" digit digit "y"\ndigit ::= [0-9]\n'),
    "structural_tag": GrammarSpec(
        "structural_tag",
        json.dumps(
            {
                "type": "structural_tag",
                "format": {
                    "type": "tags_with_separator",
                    "tags": [
                        {
                            "type": "tag",
                            "begin": "<tool_call>",
                            "content": {"type": "json_schema", "json_schema": SCHEMA},
                            "end": "</tool_call>",
                        }
                    ],
                    "separator": "\n",
                    "at_least_one": True,
                    "stop_after_first": True,
                },
            }
        ),
    ),
}


@cache
def tokenizer() -> Any:
    return load_pretrained_tokenizer(FOLDER)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(FOLDER, AnswersConfig(), VOCAB_SIZE, eos())


def compiler_over(library: Any) -> GrammarCompiler:
    """One that asks this library."""
    made = GrammarCompiler(FOLDER, AnswersConfig(), VOCAB_SIZE, ())
    made.library = library
    return made


def eos() -> tuple[int, ...]:
    return (int(tokenizer().eos_token_id),)


def open_text(spec: GrammarSpec) -> ConstrainedText:
    return compiler().text(spec)


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def allowed(text: ConstrainedText) -> set[int]:
    row = text.grammar.empty_masks(1)[0]
    text.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())
