"""Reads what a request says of its beam search, as vLLM names it, and refuses what it excludes."""

from __future__ import annotations

import dataclasses

from cluster.core import SamplingParams, SpeculationOptions
from cluster.errors import RequestError
from cluster.requests.beam_spec import BeamSpec, EarlyStopping
from cluster.spec.beam_params import MAX_LENGTH_PENALTY
from deployments.ingress.fields import Fields, shown
from deployments.ingress.spec import GenerationSpec

# Of the search alone: what they are without one.
_OWN = {"length_penalty": 1.0, "early_stopping": False}
# What would change the texts of samples and has no place in a search.
_WITHOUT = ("stop", "min_tokens", "suffix", "prediction", "prompt_logprobs", "stream")


def read_beams(fields: Fields, width: int) -> BeamSpec | None:
    """The search of a request for `width` beams, None where it draws its texts.

    Raises RequestError for fields that say something to the other kind of request alone."""
    if not fields.boolean("use_beam_search", default=False):
        for name, default in _OWN.items():
            value = fields.get(name)
            # 1 is equal to true, and says something else.
            if value is not None and (
                value != default or isinstance(value, bool) != isinstance(default, bool)
            ):
                raise RequestError.at(
                    name,
                    f"{shown(fields.get(name))} belongs to beam search; remove it or send "
                    "use_beam_search: true",
                )
        return None
    for name in _WITHOUT:
        value = fields.get(name)
        # A prompt_logprobs of 0 asks for something.
        if value or (name == "prompt_logprobs" and value is not None):
            raise RequestError.at(name, "not served with beam search; remove it, or the search")
    if fields.get("echo") and fields.get("logprobs") is not None:
        raise RequestError.at(
            "logprobs", "a beam search has none of the prompt's; remove echo or logprobs"
        )
    penalty = fields.number("length_penalty", 1.0, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    return BeamSpec(width, penalty, _early_stopping(fields))


def _early_stopping(fields: Fields) -> EarlyStopping:
    value = fields.get("early_stopping")
    if value == "never":
        return "never"
    if value is not None and not isinstance(value, bool):
        raise RequestError(
            f'early_stopping: {shown(value)}; send true, false or "never"', param="early_stopping"
        )
    return bool(value)


def with_beams(spec: GenerationSpec, beams: BeamSpec | None, num_choices: int) -> GenerationSpec:
    """`spec` as a search for its num_choices best texts; as it is where there is no search.

    What only shapes a draw (temperature, top_p, seed, ...) has no effect, as in vLLM; drafts have
    no place in it."""
    if beams is None:
        return spec
    law = SamplingParams(temperature=0.0)
    params = dataclasses.replace(
        spec.params, temperature=law.temperature, top_p=law.top_p, top_k=law.top_k,
        min_p=law.min_p, beams=beams,
    )  # fmt: skip
    return dataclasses.replace(
        spec, params=params, num_choices=num_choices, speculation=SpeculationOptions(enabled=False)
    )
