"""Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, or several with `; ` between.

The special token `<|python_tag|>` may stand before the first.
"""

from __future__ import annotations

from cluster.text.tool_calls.base import CallFormat, CallPiece, JsonCall, Parsed, json_tags

_TAG = "<|python_tag|>"


class Llama3Calls:
    """A parser: an answer that does not begin with a call is text to its end."""

    def __init__(self) -> None:
        self._call: JsonCall | None = None
        self._num_calls = 0
        self._is_text = False
        self._held = ""

    def push(self, text: str) -> Parsed:
        text, self._held = self._held + text, ""
        pieces: list[CallPiece] = []
        while text and not self._is_text:
            if self._call is None:
                opening = text.lstrip("; \n").removeprefix(_TAG).lstrip()
                if not opening or (_TAG.startswith(opening) and not self._num_calls):
                    self._held = text
                    return Parsed("", tuple(pieces))
                if not opening.startswith("{"):
                    self._is_text = True
                    break
                self._call, text = JsonCall(self._num_calls), opening
            new, text = self._call.push(text)
            pieces += new
            if self._call.is_over:
                if not self._call.is_named:
                    self._is_text = True
                    text = self._call.unread + text
                self._num_calls += self._call.is_named
                self._call = None
        return Parsed(text if self._is_text else "", tuple(pieces))

    def finish(self) -> Parsed:
        call, self._call = self._call, None
        held, self._held = self._held, ""
        return Parsed((held if not self._num_calls else "") + ("" if call is None else call.unread))


LLAMA3 = CallFormat(
    "llama3", Llama3Calls, json_tags("parameters"), trigger='{"name": ', separator="; "
)
