"""A request's beam search and where its texts end, as plain values that every layer can carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Each beam's leading candidates are ranked in every step, so a step's work grows with the square.
MAX_BEAMS = 64

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamSpec:
    """As in transformers' `generate(num_beams=..., do_sample=False)`.

    num_beams: width of the search, at least 1.
    length_penalty: a text's score is its log-probability over its length to this power.
    early_stopping: True = the search ends with num_beams texts; False = when the best unfinished
    one, if it ended now, would not be among them; "never" = when no continuation could be.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


@dataclass(frozen=True, slots=True)
class BeamEnd:
    """One of the texts of a beam search, all of which stand end to end, the best first.

    num_tokens: of it, without a stop token.  is_stopped: by a stop token, else by the limit.
    logprob: of the whole text, its stop token included.  score: what the texts are ordered by.
    """

    num_tokens: int
    is_stopped: bool
    logprob: float
    score: float
