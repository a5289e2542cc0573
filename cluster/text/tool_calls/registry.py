"""The formats of tool calls.  A new one is one file and one entry here."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.text.tool_calls.base import CallFormat
from cluster.text.tool_calls.deepseek import CALLS_BEGIN, DEEPSEEK
from cluster.text.tool_calls.harmony import HARMONY
from cluster.text.tool_calls.hermes import HERMES
from cluster.text.tool_calls.llama3 import LLAMA3
from cluster.text.tool_calls.mistral import MISTRAL

FORMATS: Mapping[str, CallFormat] = {
    each.name: each for each in (HERMES, LLAMA3, MISTRAL, DEEPSEEK, HARMONY)
}

# Texts that show which format a chat template writes; the first that is found counts.
_SIGNS = (
    ("<|channel|>", HARMONY),
    (CALLS_BEGIN, DEEPSEEK),
    ("[TOOL_CALLS]", MISTRAL),
    ("<tool_call>", HERMES),
    ("<|python_tag|>", LLAMA3),
    ('"parameters": ', LLAMA3),
)


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template writes; None where it shows none."""
    if "tools" not in template:
        return None
    return next((found for sign, found in _SIGNS if sign in template), None)
