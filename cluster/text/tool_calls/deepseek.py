"""DeepSeek: V3 writes a kind, a name and fenced JSON; V3.1 a name and bare JSON."""

from __future__ import annotations

import re

from cluster.text.tool_calls.base import NAME, CallFormat, Reads, UnreadText, marked_calls
from cluster.text.tool_calls.json_call import named_call


def _marker(words: str) -> str:
    """Its special tokens stand between full-width bars, their words joined by a block."""
    joined = words.replace(" ", "\u2581")
    return f"<\uff5c{joined}\uff5c>"


CALLS_BEGIN, _CALLS_END = _marker("tool calls begin"), _marker("tool calls end")
_CALL, _CALL_END = _marker("tool call begin"), _marker("tool call end")
_SEP = _marker("tool sep")
_FENCE = "```"

# In V3, a kind stands before the separator, and the name on the line after it.
_HEAD = re.compile(rf"\s*(?:\w*\s*{_SEP})?\s*({NAME.pattern})\s*(?:{_SEP})?\s*(?:{_FENCE}\w*)?\s*")


def _call(source: UnreadText, at: int) -> Reads[int | None]:
    if source.text.startswith(CALLS_BEGIN):
        start = yield from source.after_space(at)
        if not (yield from source.has(_CALL, start)):
            return at
        at = start + len(_CALL)
    return (yield from named_call(source, at, _HEAD))


DEEPSEEK = CallFormat(
    "deepseek",
    lambda source: marked_calls(
        source, (CALLS_BEGIN, _CALL), _call, (_FENCE, _CALL_END, _CALLS_END)
    ),
    lambda name: (f"{_CALL}{name}{_SEP}", _CALL_END),
    trigger=_CALL,
    begin=CALLS_BEGIN,
    end=_CALLS_END,
)
