"""A step's rows as a drafter inside the target is handed them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cluster.core import EMPTY_TOKENS, token_array
from cluster.draft.inside import StepRows
from cluster.spec.logprobs import TopTokens

_LOGPROBS = np.log(np.array([0.7, 0.2, 0.1], np.float32))


def step_rows(
    token_ids: Sequence[int],
    top: Any,
    parents: Any = (),
    logprobs: Any = _LOGPROBS,
    **changes: Any,
) -> StepRows:
    """Of request "a": rows of its text, then the nodes with these parents.

    top: of the last row of the text and of each node, the most probable tokens."""
    likely = np.array(top, np.int32)
    found = TopTokens(likely, np.broadcast_to(logprobs, likely.shape).astype(np.float32))
    nodes = token_array(parents)
    num_context, ids = len(token_ids) - len(nodes), token_array(token_ids)
    held = StepRows(
        "a", 1, "default", b"", 0, ids, num_context, nodes, EMPTY_TOKENS, 99, None, found
    )
    return replace(held, **changes)
