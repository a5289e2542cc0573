"""Mistral: `[TOOL_CALLS]` and a JSON list of calls, or since v11 `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re

from cluster.text.tool_calls.base import NAME, CallFormat, Reads, UnreadText, marked_calls
from cluster.text.tool_calls.json_call import json_call, named_call

_MARKER = "[TOOL_CALLS]"
_HEAD = re.compile(rf"\s*({NAME.pattern})\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")


def _call(source: UnreadText, at: int) -> Reads[int | None]:
    """The first character after the marker tells which form it is."""
    start = yield from source.after_space(at)
    if source.text.startswith("[", start):
        return (yield from _listed(source, start + 1))
    return (yield from named_call(source, at, _HEAD))


def _listed(source: UnreadText, at: int) -> Reads[int | None]:
    while True:
        text_len = yield from json_call(source, at)
        if text_len is not None:
            return text_len
        at = yield from source.after_space(0)
        if not source.text.startswith(",", at):
            yield from source.take_ends(("]",))
            return None
        at += 1


MISTRAL = CallFormat(
    "mistral",
    lambda source: marked_calls(source, (_MARKER,), _call),
    lambda name: (f"{_MARKER}{name}[ARGS]", ""),
    trigger=_MARKER,
)
