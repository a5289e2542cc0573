"""gpt-oss: every message of an answer names its channel.

`analysis` is the reasoning, `final` the answer, and a message `to=functions.NAME` a call whose
text is its arguments.  The text is read, not its tokens: `openai_harmony` fetches a vocabulary of
its own when it starts, and what a coordinator sends may begin in the midst of a message.
"""

from __future__ import annotations

import re

from cluster.text.markers import first_of, held_len
from cluster.text.tool_calls.base import CallFormat, CallPiece, Parsed

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyMessages:
    """A parser of calls and reasoning.  An answer begins with the header of a message."""

    def __init__(self) -> None:
        self._header: str | None = ""
        self._channel = ""
        self._held = ""
        self._num_calls = 0
        self._is_call = False

    def push(self, text: str) -> Parsed:
        text, self._held = self._held + text, ""
        answer = reasoning = ""
        pieces: list[CallPiece] = []
        while text:
            if self._header is not None:
                self._header, text = self._header + text, ""
                header, found, rest = self._header.partition(_MESSAGE)
                if not found:
                    break
                self._header, text = None, rest
                pieces += self._opened(header)
                continue
            ended = first_of(text, _ENDS)
            if ended is None:
                held = held_len(text, _ENDS)
                body, self._held, text = text[: len(text) - held], text[len(text) - held :], ""
            else:
                body, _, text = ended
                self._header = ""
            if self._is_call:
                pieces += [CallPiece(self._num_calls - 1, arguments=body)] if body else []
            elif self._channel == "final" or not self._channel:
                answer += body
            else:
                reasoning += body
        return Parsed(answer, tuple(pieces), reasoning)

    def _opened(self, header: str) -> list[CallPiece]:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        self._channel = channel.group(1) if channel else ""
        self._is_call = recipient is not None
        if recipient is None:
            return []
        self._num_calls += 1
        return [CallPiece(self._num_calls - 1, recipient.group(1))]

    def finish(self) -> Parsed:
        rest, self._held = self._held, ""
        # A header that never ended is no header.
        return Parsed(rest if self._header is None else self._header)


def _tags(name: str) -> tuple[str, str]:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json{_MESSAGE}", ""


HARMONY = CallFormat(
    "harmony", HarmonyMessages, _tags, trigger="<|channel|>commentary to=functions."
)
