"""What a body calls the fields that are found wrong only when its request runs.

What runs a request knows fields by the names of OpenAI's chats and completions.  An error that it
raises is raised again with the field of the body; the rest of the message is never touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

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
