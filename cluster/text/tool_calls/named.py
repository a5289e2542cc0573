"""Calls that begin with a marker and a name, and whose arguments follow as a JSON object."""

from __future__ import annotations

import re

from cluster.text.tool_calls.base import Reads, Source
from cluster.text.tool_calls.json_call import arguments

# Longer ones have white space that no model writes.
_MAX_HEAD_LEN = 256


def named_call(source: Source, at: int, head: re.Pattern[str]) -> Reads[int | None]:
    """Read the call whose head is at `at`.

    head: all that stands before the arguments; its group is the name.
    """
    while (brace := source.text.find("{", at, at + _MAX_HEAD_LEN)) < 0:
        if source.is_whole or len(source.text) >= at + _MAX_HEAD_LEN:
            return at
        yield None
    found = head.fullmatch(source.text, at, brace)
    first = yield from source.after_space(brace + 1)
    if found is None or source.text[first : first + 1] not in ('"', "}"):
        return at
    source.take(brace)
    yield source.called(found.group(1))
    yield from arguments(source)
    return None
