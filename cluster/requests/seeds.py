"""Which seed a request is sampled with: the one it sends, or one drawn for it."""

from __future__ import annotations

import secrets

# JSON readers that keep every number as a double hold integers up to 2**53 exactly.
_NUM_DRAWN_BITS = 53


def asked_seed(seed: int | None) -> int | None:
    """The seed that a client asks for; None if one is to be drawn, which a negative one means."""
    return None if seed is None or seed < 0 else seed


def draw_seed() -> int:
    """A random seed, small enough to pass through any JSON reader unchanged."""
    return secrets.randbits(_NUM_DRAWN_BITS)
