"""The three protocols of a library for grammars, which the files beside this one implement.

A grammar is compiled once; every text has a matcher of its own.  Token ids are the target's.
End-of-sequence tokens are no business of a backend's matcher: `cluster.grammar.text` adds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cluster.errors import RequestError
from cluster.requests.grammar_spec import GrammarSpec

# One bit per token of the vocabulary, the lowest bit first: uint32[words] is a row of a mask.
MaskRow = npt.NDArray[np.uint32]

_MAX_REASON_CHARS = 300


class Matcher(Protocol):
    """Where one text stands in its grammar."""

    def push(self, token_id: int) -> bool:
        """Append a token; False, and nothing has changed, where the grammar forbids it.

        Raises RequestError where the grammar takes too much work to go on, now and ever after.
        """
        ...

    def pop(self, count: int) -> None:
        """Take the last `count` tokens back."""
        ...

    def may_end(self) -> bool:
        """True if the text so far is complete."""
        ...

    def fill(self, row: MaskRow) -> None:
        """Set the bits of the tokens that may follow, and clear the others.  Raises as `push`."""
        ...

    def forced(self) -> Sequence[int]:
        """The tokens that must follow, as far as they are certain; none after an end."""
        ...


class Grammar(Protocol):
    """A compiled grammar; it can be shared between threads."""

    def matcher(self) -> Matcher:
        """A matcher of a text that has not begun."""
        ...


class Backend(Protocol):
    """Compiles grammars for one vocabulary; it can be shared between threads."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises RequestError with the reason, for the author of the grammar."""
        ...


def refusal(reason: str) -> RequestError:
    """The error for a grammar that a library refuses, for one reason of its own."""
    short = " ".join(reason.split())[:_MAX_REASON_CHARS]
    return RequestError(f"the grammar cannot be used: {short}; change it", param="grammar")


def mask_words(vocab_size: int) -> int:
    """The width of a mask, in words of 32 tokens."""
    return -(-vocab_size // 32)
