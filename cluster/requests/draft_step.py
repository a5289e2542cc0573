"""A step of one text with the drafts that it verified, for requests that ask for them."""

from __future__ import annotations

from dataclasses import field

import numpy as np
import numpy.typing as npt

from cluster.records import record

_TOKENS: npt.NDArray[np.int32] = np.empty(0, np.int32)
_FLOATS: npt.NDArray[np.float32] = np.empty(0, np.float32)
_BITS: npt.NDArray[np.uint32] = np.empty(0, np.uint32)


@record
class DraftStep:
    """One step of a text, as `return_draft_trees` shows it.

    token_ids, parents: the tree that was verified, as in `TokenTree`.  survival: float32[n], the
    expected probability that the text passes through the node.  sources: uint32[n], who proposed
    the node, as bits over `drafters`.
    path: the accepted nodes, root first, as far as the text goes.  own_token_ids: the token that
    the target added; empty where the text ended before.  The two together are the step's tokens.
    num_sequences: texts in the step.  why: a name of `PlainWhy` in lower case, "" = none.
    number, at_s: the ingress sets them: the number of the step, from 0, and the seconds since it
    sent the request.
    """

    drafters: tuple[str, ...] = ()
    token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: _TOKENS)
    parents: npt.NDArray[np.int32] = field(default_factory=lambda: _TOKENS)
    survival: npt.NDArray[np.float32] = field(default_factory=lambda: _FLOATS)
    sources: npt.NDArray[np.uint32] = field(default_factory=lambda: _BITS)
    path: npt.NDArray[np.int32] = field(default_factory=lambda: _TOKENS)
    own_token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: _TOKENS)
    draft_time_s: float = 0.0
    step_time_s: float = 0.0
    num_sequences: int = 0
    why: str = ""
    number: int = 0
    at_s: float = 0.0

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)
