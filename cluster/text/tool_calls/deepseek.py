"""DeepSeek: V3 writes a kind, a name and fenced JSON; V3.1 a name and bare JSON."""

from __future__ import annotations

from cluster.text.tool_calls.base import CallFormat, CallParser
from cluster.text.tool_calls.named import NamedCalls


def _marker(words: str) -> str:
    """Its special tokens stand between full-width bars, their words joined by a block."""
    joined = words.replace(" ", "\u2581")
    return f"<\uff5c{joined}\uff5c>"


CALLS_BEGIN, _CALLS_END = _marker("tool calls begin"), _marker("tool calls end")
_CALL, _CALL_END = _marker("tool call begin"), _marker("tool call end")
_SEP = _marker("tool sep")


def _name_of(head: str) -> str:
    """In V3, a kind stands before the separator, and the name on the line after it."""
    first, _, second = head.partition(_SEP)
    return second.partition("\n")[0].strip() or first.strip()


def _parser() -> CallParser:
    return NamedCalls(_CALL, _name_of, (CALLS_BEGIN, _CALLS_END, _CALL_END, "\n```"))


DEEPSEEK = CallFormat(
    "deepseek",
    _parser,
    lambda name: (f"{_CALL}{name}{_SEP}", _CALL_END),
    trigger=_CALL,
    begin=CALLS_BEGIN,
    end=_CALLS_END,
)
