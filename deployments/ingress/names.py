"""What the body of each endpoint calls the fields that one parser reads for all of them.

The parsers, and what runs a request, know fields by the names of OpenAI's chats and completions.
An endpoint whose bodies say the same otherwise translates the field that an error names; the rest
of the message is never touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import RequestError


@dataclass(frozen=True, slots=True)
class Names:
    """own: a path as the parsers know it, to that in the body; what lies below it moves with it."""

    own: Mapping[str, str] = field(default_factory=dict)

    def of(self, path: str) -> str:
        """`path` as the body has it."""
        known = path
        while known and known not in self.own:
            known = known[: max(known.rfind("."), known.rfind("["), 0)]
        return self.own[known] + path[len(known) :] if known else path

    def also(self, **known: str) -> Names:
        """With more fields, each by its path as the parsers know it; "" for one that is nowhere."""
        return Names({**self.own, **{key: self.of(path) for key, path in known.items() if path}})

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """RequestErrors that are raised inside name the body's field."""
        try:
            yield
        except RequestError as error:
            own = None if error.param is None else self.of(error.param)
            if own is None or own == error.param:
                raise
            raise type(error)(f"{own}: {error.reason}", param=own) from None


# Of a body whose prompt is a conversation.
OF_CHATS = Names({"prompt": "messages"})


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of a chat that was written as something else.

    places: where its fields are in the body, by their paths below the message; "" = all others.
    """

    message: Any
    places: Mapping[str, str]


def places_of(turns: Sequence[Turn], start: int = 0) -> dict[str, str]:
    """Of `Names`, for the messages of a chat, the first of which has the number `start`."""
    return {
        f"messages[{number}]{below}": own
        for number, turn in enumerate(turns, start)
        for below, own in turn.places.items()
    }
