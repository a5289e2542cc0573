"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number."""

from __future__ import annotations

from cluster.text.tool_calls.base import CallFormat, CallParser, MarkedJsonCalls, json_tags


def _parser() -> CallParser:
    return MarkedJsonCalls("<tool_call>", ("</tool_call>",))


HERMES = CallFormat(
    "hermes",
    _parser,
    json_tags("arguments", "<tool_call>\n", "\n</tool_call>"),
    trigger="<tool_call>",
    separator="\n",
)
