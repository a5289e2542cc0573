"""Mistral: `[TOOL_CALLS]` and a JSON list of calls, or since v11 `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

from cluster.text.tool_calls.base import CallFormat, CallPiece, JsonCall, Parsed
from cluster.text.tool_calls.named import NamedCalls

_MARKER = "[TOOL_CALLS]"


class MistralCalls:
    """A parser for both: the first character after the marker tells which."""

    def __init__(self) -> None:
        self._named = NamedCalls(_MARKER, lambda head: head.partition("[")[0].strip())
        self._seen = ""
        self._listed: JsonCall | None = None
        self._num_calls = 0
        self._is_list: bool | None = None

    def push(self, text: str) -> Parsed:
        if self._is_list is None:
            self._seen += text
            before, found, after = self._seen.partition(_MARKER)
            opening = after.lstrip()
            if not found or not opening:
                # Text before the marker is not kept back by the one that reads names.
                if not found and not any(
                    self._seen.endswith(_MARKER[:size]) for size in range(1, len(_MARKER))
                ):
                    text, self._seen = self._seen, ""
                    return Parsed(text)
                return Parsed()
            self._is_list = opening.startswith("[")
            if not self._is_list:
                return self._named.push(self._seen)
            parsed = self._push_list(opening[1:])
            return Parsed(before if before.strip() else "", parsed.calls)
        return self._push_list(text) if self._is_list else self._named.push(text)

    def _push_list(self, text: str) -> Parsed:
        pieces: list[CallPiece] = []
        while text:
            if self._listed is None:
                text = text.lstrip(", \n")
                if not text.startswith("{"):
                    break  # the end of the list
                self._listed = JsonCall(self._num_calls)
            new, text = self._listed.push(text)
            pieces += new
            if self._listed.is_over:
                self._num_calls += self._listed.is_named
                self._listed = None
        return Parsed("", tuple(pieces))

    def finish(self) -> Parsed:
        if self._is_list is None:
            return Parsed(self._seen)
        return Parsed() if self._is_list else self._named.finish()


MISTRAL = CallFormat(
    "mistral",
    MistralCalls,
    lambda name: (f"{_MARKER}{name}[ARGS]", ""),
    trigger=_MARKER,
)
