"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number."""

from __future__ import annotations

from cluster.text.tool_calls.base import CallFormat, Reads, UnreadText, json_tags, marked_calls
from cluster.text.tool_calls.json_call import json_call

_START, _END = "<tool_call>", "</tool_call>"


def _call(source: UnreadText, marker: str) -> Reads[int | None]:
    text_len = yield from json_call(source, len(marker))
    if text_len is None:
        yield from source.take_ends((_END,))
    return text_len


HERMES = CallFormat(
    "hermes",
    lambda source: marked_calls(source, (_START,), _call),
    json_tags("arguments", f"{_START}\n", f"\n{_END}"),
    trigger=_START,
    separator="\n",
)
