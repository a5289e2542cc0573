"""Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, or several with `; ` between.

The special token `<|python_tag|>` may stand before the first.  Behind an object that is no
call, all of an answer is text.
"""

from __future__ import annotations

from cluster.text.tool_calls.base import CallFormat, Part, Reads, UnreadText, json_tags
from cluster.text.tool_calls.json_call import json_call

_TAG = "<|python_tag|>"
_SEPARATOR = ";"


def _read(source: UnreadText) -> Reads[None]:
    before = _TAG
    while True:
        at = yield from source.after_space(0)
        if (yield from source.has(before, at)):
            at += len(before)
        if (yield from json_call(source, at)) is not None:
            break
        before = _SEPARATOR
    yield from source.until((), Part)


LLAMA3 = CallFormat(
    "llama3", _read, json_tags("parameters"), trigger='{"name": ', separator=f"{_SEPARATOR} "
)
