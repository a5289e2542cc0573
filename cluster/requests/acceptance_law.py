"""The laws by which a request's drafts are accepted, and those that drafts are drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from cluster.records import record

# coupled: a draft is accepted where it is the target's own draw, so no draft changes the text.  The
# others are the textbook's, by the ratio of probabilities, under which texts depend on drafts:
# rejection: of chains.  multi_step: of siblings in turn.
Law = Literal["coupled", "rejection", "multi_step"]
LAWS: tuple[Law, ...] = get_args(Law)
# What to do about laws that were served once.
REMOVED_LAWS: Mapping[str, str] = {"block": "rejection accepts as many drafts, so name that"}


@record
class DraftLaw:
    """The law from which the children of a node were drawn, one after another without replacement.

    token_ids: int64[k], different ones.  probs: float64[k], positive, with the sum 1.
    """

    token_ids: npt.NDArray[np.int64]
    probs: npt.NDArray[np.float64]


# By parent, -1 = the context.  The children of a parent without a law were chosen, not drawn.  They
# never travel, so that no peer's word can change a text's law.
Laws = Mapping[int, DraftLaw]
NO_LAWS: Laws = {}
