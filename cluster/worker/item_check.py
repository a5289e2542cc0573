"""Checks an item before the engine sees it, and refuses one."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cluster.core import VerifyItem
from cluster.errors import DrafthouseError, ProtocolError
from cluster.messages import Refusal


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """The engine holds only `have_len` tokens; it lost or never had the rest."""

    request_id: str
    generation: int
    have_len: int


log = logging.getLogger(__name__)


def check_item(item: VerifyItem, vocab_size: int) -> None:
    """Raise ProtocolError for an item that makes no sense in itself."""
    if item.base_len < 0:
        raise ProtocolError(f"base_len is {item.base_len}; it counts tokens from 0")
    if len(item.delta) == 0:
        raise ProtocolError("delta is empty; send at least the last committed token")
    if item.delta.min() < 0 or item.delta.max() >= vocab_size:
        raise ProtocolError(
            f"delta holds a token outside the target's vocabulary 0..{vocab_size - 1}"
        )
    if not 1 <= item.prompt_len <= item.context_len:
        raise ProtocolError(
            f"prompt_len is {item.prompt_len}; give 1..{item.context_len}, "
            "and send the whole prompt before a draw"
        )


def refusal(item: VerifyItem, error: DrafthouseError) -> Refusal:
    """The answer to an item that ends with `error`; it stands in the log."""
    log.warning(
        "item refused request=%s generation=%s code=%s: %s",
        item.request_id, item.generation, error.code, error.message,
    )  # fmt: skip
    return Refusal(item.request_id, item.generation, error.code, error.message)
