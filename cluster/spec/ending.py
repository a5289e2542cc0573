"""The one function that decides where a text ends."""

from __future__ import annotations

from collections.abc import Collection

from cluster.core import FinishReason, TokenArray


def cut(
    token_ids: TokenArray,
    num_output: int,
    remaining: int,
    stop_ids: Collection[int],
    min_tokens: int,
) -> tuple[int, FinishReason | None]:
    """Return how many of a step's tokens belong to the text, and why it ends; None = it goes on.

    num_output: number of output tokens before this step.  remaining: the most tokens that may
    follow them.  stop_ids end the text once it has min_tokens, and are not part of it.
    """
    if stop_ids:
        for index, token in enumerate(token_ids[: max(remaining, 0)].tolist()):
            if token in stop_ids and num_output + index >= min_tokens:
                return index, FinishReason.STOP
    if len(token_ids) >= remaining:
        return max(remaining, 0), FinishReason.LENGTH
    return len(token_ids), None
