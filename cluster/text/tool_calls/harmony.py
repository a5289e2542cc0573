"""gpt-oss: every message of an answer names its channel.

`analysis` is the reasoning, `final` the answer, and a message `to=functions.NAME` a call whose
text is its arguments.  The text is read, not its tokens: `openai_harmony` fetches a vocabulary of
its own when it starts, and what a coordinator sends may begin in the midst of a message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from cluster.text.tool_calls.base import (
    NAME,
    CallFormat,
    Part,
    Reads,
    UnreadText,
    first_of,
)
from cluster.text.tool_calls.json_call import JsonValue

_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_RECIPIENT = re.compile(rf"to=functions\.({NAME.pattern})(?![^\s<])")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
# A header that an answer breaks off in, before the text of its next message.
_CUT_HEADER = re.compile(
    r"\s*(?:assistant\s*)?(?:to=[^\s<]*\s*)?"
    r"(?:<\|channel\|>\s*\w*\s*(?:to=[^\s<]*\s*)?(?:<\|constrain\|>)?\s*(?:json)?)?"
)
_MAX_HEADER_LEN = 256


def _read(source: UnreadText) -> Reads[None]:
    end = ""
    while True:
        header = yield from _take_header(source, is_started=end == _START)
        call, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if call is not None:
            yield source.called(call.group(1))
            end = yield from source.until(_ENDS, _arguments(source))
            if end:
                yield source.called(None, is_end=True)
        else:
            is_answer = channel is None or channel.group(1) == "final"
            kind = "text" if is_answer else "reasoning"
            end = yield from source.until(_ENDS, partial(Part, kind=kind))
        if not end:
            return
        source.take(len(end))


def _take_header(source: UnreadText, *, is_started: bool) -> Reads[str]:
    """Take the header of a message; "" where the source begins with text.

    is_started: the token that starts a message has been read.  That of the first message stands in
    the prompt.
    """
    while True:
        found = first_of(source.text[:_MAX_HEADER_LEN], (_MESSAGE, *_ENDS))
        if found is not None and found[1] == _MESSAGE:
            return source.take(found[0] + len(_MESSAGE))
        if found is not None or len(source.text) >= _MAX_HEADER_LEN:
            return ""
        if source.is_whole:
            is_header = is_started or "<|channel|>" in source.text
            if is_header and _CUT_HEADER.fullmatch(source.text):
                source.take(len(source.text))
            return ""
        yield None


def _arguments(source: UnreadText) -> Callable[[str], Part]:
    value = JsonValue()

    def piece(text: str) -> Part:
        value.push(text)
        return source.called(None, text, is_end=value.is_over)

    return piece


def _tags(name: str) -> tuple[str, str]:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json{_MESSAGE}", ""


HARMONY = CallFormat("harmony", _read, _tags, trigger="<|channel|>commentary to=functions.")
