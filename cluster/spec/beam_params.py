"""Checks whether a target can serve a beam search.  Torch-free: the ingress checks too."""

from __future__ import annotations

import math

from cluster.core import SamplingParams
from cluster.errors import RequestError
from cluster.requests.beam_spec import MAX_BEAMS

# A text's score is divided by its length to this power, which must stay finite for any length.
MAX_LENGTH_PENALTY = 8.0


def check_beams(params: SamplingParams) -> None:
    """Raise RequestError, naming the field, for an invalid beam search; requests without a beam
    search pass."""
    spec = params.beams
    if spec is None:
        return
    if not 1 <= spec.num_beams <= MAX_BEAMS:
        raise RequestError(
            f"a beam search of {spec.num_beams} beams; send 1 to {MAX_BEAMS}", param="n"
        )
    if not (math.isfinite(spec.length_penalty) and abs(spec.length_penalty) <= MAX_LENGTH_PENALTY):
        raise RequestError(
            f"length_penalty is {spec.length_penalty}; give a number in "
            f"[{-MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]",
            param="length_penalty",
        )
    for name, is_set in (
        ("presence_penalty", params.presence_penalty != 0.0),
        ("frequency_penalty", params.frequency_penalty != 0.0),
        ("repetition_penalty", params.repetition_penalty != 1.0),
        ("logit_bias", bool(params.logit_bias)),
        ("min_tokens", params.min_tokens > 0),
        ("prediction", bool(params.prediction)),
        ("forced_ids", bool(params.forced_ids)),
        ("grammar", params.grammar is not None),
    ):
        if is_set:
            raise RequestError(
                f"{name}: a beam search ranks texts by the model's own law; remove {name} or "
                "use_beam_search",
                param=name,
            )
