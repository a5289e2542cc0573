"""A request's beam search and where its texts end, as plain values that every layer can carry."""

from __future__ import annotations

from typing import Literal

from cluster.records import frozen

# A step ranks the best candidates of every beam, so its work grows with the square of the width.
MAX_BEAMS = 64

EarlyStopping = bool | Literal["never"]


@frozen
class BeamSpec:
    """The settings of transformers' `generate(num_beams=..., do_sample=False)`.

    num_beams: width of the search, at least 1.
    length_penalty: a text's score is its log-probability over its length to this power.
    early_stopping: True = the search ends with num_beams texts; False = when the best unfinished
    one, if it ended now, would not be among them; "never" = when no continuation could be.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


@frozen
class BeamEnd:
    """The end of one text of a beam search; all texts stand end to end, the best first.

    num_tokens: its length without a stop token.  is_stopped: it ends at a stop token, not at the
    limit.  logprob: of the whole text, its stop token included.  score: orders the texts.
    """

    num_tokens: int
    is_stopped: bool
    logprob: float
    score: float
