"""A text with the drafter of each part shown: in colours on a terminal, else with marks."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from deployments.openai_client import Token

# Readable on dark and on light ground: green, blue, magenta, yellow, cyan, red.
_COLOURS = (32, 34, 35, 33, 36, 31)
_RESET = "\x1b[0m"


def coloured(text: str, tokens: Sequence[Token], names: Sequence[str], *, in_colour: bool) -> str:
    """`text`, every accepted run of it in the colour of its drafter, or as [drafter|run].

    names: of all drafters.  A token of several is shown as that of the one for which it counts.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()  # a character may span tokens
    pieces = [(name, decoder.decode(data)) for name, data in _pieces(text.encode(), tokens)]
    return "".join(
        _shown("".join(piece for _, piece in run), name, names, in_colour=in_colour)
        for name, run in groupby(filter(itemgetter(1), pieces), itemgetter(0))
    )


def legend(names: Sequence[str], *, in_colour: bool) -> str:
    """Which mark or colour is whose."""
    shown = ", ".join(_shown(name, name, names, in_colour=True) for name in names)
    return (
        f"drafted by {shown}; the rest by the target"
        if in_colour
        else ("[drafter|text] was drafted; the rest is the target's own")
    )


def _pieces(data: bytes, tokens: Sequence[Token]) -> Iterator[tuple[str, bytes]]:
    """Yield `data` cut at the ends of tokens, with the drafter of each piece, "" for the target."""
    position = 0
    for token in tokens:
        end = _end_of(token.data, data, position)
        if end is not None:
            yield token.owner, data[position:end]
            position = end
    yield "", data[position:]


def _end_of(token: bytes, data: bytes, position: int) -> int | None:
    """Where in `data` the token ends that begins at `position`; None if it is not there."""
    if data.startswith(token, position):
        return position + len(token)
    # Decoded alone a token may lack the space before it; special ones are no text at all.
    bare = token.strip()
    found = data.find(bare, position, position + len(token) + 1) if bare else -1
    return None if found < 0 else found + len(bare)


def _shown(text: str, name: str, names: Sequence[str], *, in_colour: bool) -> str:
    if not name:
        return text
    if not in_colour:
        return f"[{name}|{text}]"
    return f"\x1b[{_COLOURS[names.index(name) % len(_COLOURS)]}m{text}{_RESET}"
