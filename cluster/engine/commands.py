"""The calls on rank 0's engine that the other ranks repeat, and their form on the way.

A message is the calls as JSON: of each its name and its arguments.  Nothing that arrives is run but
a call of these names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from cluster.core import TokenTree, token_array
from cluster.engine.work import Work
from cluster.errors import ProtocolError

# Methods of the engine; the last one ends the others' work.
CALLS = ("submit", "retain", "release", "forget_prefixes", "capture_ahead", "step", "close")
# Of a work, what concerns the leading rank alone, or is served by one rank only.
_UNTOLD = ("num_top", "adapter")

# One of CALLS, and its arguments.
Call = tuple[str, Sequence[Any]]


def encode(calls: Sequence[Call]) -> bytes:
    """The body of a message."""
    return json.dumps(calls, default=_plain).encode()


def _plain(value: Any) -> Any:
    """A work, and what it consists of."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return value.hex()
    return [getattr(value, each.name) for each in fields(value) if each.name not in _UNTOLD]


def decode(body: bytes) -> list[Call]:
    """The calls of a body; raises ProtocolError for anything else."""
    try:
        return [(name, _arguments(name, given)) for name, given in json.loads(body)]
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ProtocolError(f"a rank's commands cannot be read: {error}") from error


def _arguments(name: str, given: Sequence[Any]) -> Sequence[Any]:
    if name not in CALLS:
        raise ProtocolError(f"a rank's commands hold one of the unknown kind {name!r}")
    if name != "submit":
        return given
    request_id, base_len, delta, tree, num_cached_nodes, prefix_hash, tenant = given[0]
    return [
        Work(
            request_id,
            base_len,
            token_array(delta),
            TokenTree(*map(token_array, tree)),
            num_cached_nodes,
            prefix_hash,
            bytes.fromhex(tenant),
        )
    ]
