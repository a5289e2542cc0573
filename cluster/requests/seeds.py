"""Determines the seed with which a request is sampled: its own, or one drawn for it."""

from __future__ import annotations

import secrets
from hashlib import blake2b

# JSON readers that keep every number as a double hold integers up to 2**53 exactly.
_NUM_DRAWN_BITS = 53


def asked_seed(seed: int | None) -> int | None:
    """Return the seed that a client asks for; None or a negative one asks for a drawn seed."""
    return None if seed is None or seed < 0 else seed


def draw_seed() -> int:
    """Draw a random seed that is small enough to pass through any JSON reader unchanged."""
    return secrets.randbits(_NUM_DRAWN_BITS)


def derived_key(seed: int, *words: str | int) -> int:
    """Return another 64-bit key for a 64-bit seed, from which the seed cannot be told."""
    said = " ".join(map(str, words)).encode()
    return int.from_bytes(blake2b(seed.to_bytes(8, "little") + said, digest_size=8).digest())
