"""Checks whether a target can serve sampling parameters.  Torch-free: the ingress checks too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cluster.core import SamplingParams, TokenArray
from cluster.errors import RequestError
from cluster.requests.fields import LAWS, MAX_BEAMS

# The limit of a request's prediction, which is sent with each opening of the request and indexed.
MAX_PREDICTION_TOKENS = 32_768


# The smallest normal float32, because the target divides by the temperature in single precision.
_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)


# The least and the greatest value of each number; of some the least is none of them.
_RANGES = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-math.inf, math.inf),
    "frequency_penalty": (-math.inf, math.inf),
    "repetition_penalty": (0.0, math.inf),
    "top_k": (0, math.inf),
    "min_tokens": (0, math.inf),
}
_LOW_OPEN = ("top_p", "repetition_penalty")
# A text's score is divided by its length to this power, which must stay finite for any length.
MAX_LENGTH_PENALTY = 8.0
# What only a text that is drawn may have.
_OF_DRAWS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "prediction",
    "forced_ids",
    "grammar",
)


def divisor(params: SamplingParams) -> float:
    """Return the temperature by which the target divides logits; 0 = the law is greedy."""
    return max(params.temperature, _LEAST_TEMPERATURE) if params.temperature > 0.0 else 0.0


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError for an invalid parameter; the error names field, value and range."""
    for name, (low, high) in _RANGES.items():
        _check_range(name, getattr(params, name), low, high)
    if params.logprobs is not None:
        _check_range("logprobs", params.logprobs, 0, vocab_size)
    check_tokens("logit_bias", [token for token, _ in params.logit_bias], vocab_size)
    for _, value in params.logit_bias:
        _check_range("logit_bias", value, -math.inf, math.inf)
    _check_prediction(params.prediction, vocab_size)
    _check_beams(params)
    _check_forced(params, vocab_size)
    _check_law(params)


def clash_of_law(params: SamplingParams) -> str:
    """Return the field that gives no text under the textbook's laws, "" = there is none."""
    names = "prediction", "forced_ids", "beams"
    return next((name for name in names if getattr(params, name)), "")


def _check_law(params: SamplingParams) -> None:
    if params.law not in LAWS:
        raise RequestError(
            f"speculation.law is {params.law!r}; the laws are {', '.join(LAWS)}",
            param="speculation.law",
        )
    clash = "" if params.is_coupled else clash_of_law(params)
    if clash:
        raise RequestError(
            f"speculation.law is {params.law}, which does not go with {clash}; remove one of both",
            param="speculation.law",
        )


def _check_beams(params: SamplingParams) -> None:
    spec = params.beams
    if spec is None:
        return
    if not 1 <= spec.num_beams <= MAX_BEAMS:
        raise RequestError(
            f"a beam search of {spec.num_beams} beams; send 1 to {MAX_BEAMS}", param="n"
        )
    _check_range("length_penalty", spec.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    plain = SamplingParams()
    for name in _OF_DRAWS:
        if getattr(params, name) != getattr(plain, name):
            raise RequestError(
                f"{name}: a beam search ranks texts by the model's own law; remove {name} or "
                "use_beam_search",
                param=name,
            )


def _check_forced(params: SamplingParams, vocab_size: int) -> None:
    token_ids = params.forced_ids
    if not token_ids:
        return
    check_tokens("forced_ids", token_ids, vocab_size)
    if params.max_tokens != len(token_ids):
        raise RequestError(
            f"max_tokens is {params.max_tokens} and forced_ids are {len(token_ids)} tokens; they "
            "are the whole output, so give their number",
            param="max_tokens",
        )
    if params.grammar is not None:
        raise RequestError(
            "forced_ids are the output whatever a grammar says; remove one of both",
            param="forced_ids",
        )


def _check_prediction(token_ids: Sequence[int], vocab_size: int) -> None:
    if len(token_ids) > MAX_PREDICTION_TOKENS:
        raise RequestError(
            f"prediction has {len(token_ids)} tokens; at most {MAX_PREDICTION_TOKENS} are read; "
            "send the part that the output begins with",
            param="prediction",
        )
    check_tokens("prediction", token_ids, vocab_size)


def check_tokens(name: str, token_ids: Sequence[int] | TokenArray, vocab_size: int) -> None:
    """Raise RequestError for a field with a token that is outside the vocabulary."""
    known = np.asarray(token_ids)
    wrong = known[(known < 0) | (known >= vocab_size)]
    if len(wrong):
        raise RequestError(
            f"{name} names token {wrong[0]}; the vocabulary is 0..{vocab_size - 1}", param=name
        )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    low_open = name in _LOW_OPEN
    if math.isfinite(value) and low <= value <= high and not (low_open and value == low):
        return
    opening = "(" if low_open or low == -math.inf else "["
    closing = ")" if high == math.inf else "]"
    raise RequestError(
        f"{name} is {value}; give a finite number in {opening}{low}, {high}{closing}", param=name
    )
