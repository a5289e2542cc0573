"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number."""

from __future__ import annotations

from cluster.text.tool_calls.base import CallFormat, json_tags, marked_calls
from cluster.text.tool_calls.json_call import json_call

_START, _END = "<tool_call>", "</tool_call>"

HERMES = CallFormat(
    "hermes",
    lambda source: marked_calls(source, (_START,), json_call, (_END,)),
    json_tags("arguments", f"{_START}\n", f"\n{_END}"),
    trigger=_START,
    separator="\n",
)
