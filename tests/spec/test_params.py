"""Every sampling parameter has a range; the edge belongs to it or not, and the refusal says so."""

import math
from typing import Any

import pytest

from cluster.core import SamplingParams
from cluster.errors import RequestError
from cluster.requests.fields import MAX_BEAMS, BeamSpec, GrammarSpec
from cluster.spec.params import MAX_PREDICTION_TOKENS, check_params

VOCAB_SIZE = 100
TINY = 5e-324
FORCED = {"forced_ids": (1,), "max_tokens": 1}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", (0.0, TINY, 1e300)),
        ("top_p", (TINY, 0.5, 1.0)),
        ("min_p", (0.0, 0.5, 1.0)),
        ("presence_penalty", (-1e300, 0.0, 1e300)),
        ("frequency_penalty", (-1e300, 0.0, 1e300)),
        ("repetition_penalty", (TINY, 1.0, 1e300)),
        ("top_k", (0, 1, VOCAB_SIZE + 1)),
        ("min_tokens", (0, 1, 10**9)),
        ("logprobs", (None, 0, VOCAB_SIZE)),
        ("logit_bias", ((), ((0, -100.0),), ((VOCAB_SIZE - 1, 1e300),))),
        ("prediction", ((), (0, VOCAB_SIZE - 1), (1,) * MAX_PREDICTION_TOKENS)),
        ("beams", (None, BeamSpec(1), BeamSpec(MAX_BEAMS))),
    ],
)
def test_what_has_a_meaning_is_accepted(field: str, values: tuple[object, ...]):
    for value in values:
        check_params(SamplingParams(**{field: value}), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("field", "value", "interval"),
    [
        ("temperature", -0.1, "[0.0, inf)"),
        ("temperature", math.nan, "[0.0, inf)"),
        ("temperature", math.inf, "[0.0, inf)"),
        ("top_p", 0.0, "(0.0, 1.0]"),
        ("top_p", 1.5, "(0.0, 1.0]"),
        ("min_p", -TINY, "[0.0, 1.0]"),
        ("min_p", 2.0, "[0.0, 1.0]"),
        ("presence_penalty", math.nan, "(-inf, inf)"),
        ("presence_penalty", -math.inf, "(-inf, inf)"),
        ("frequency_penalty", math.inf, "(-inf, inf)"),
        ("repetition_penalty", 0.0, "(0.0, inf)"),
        ("repetition_penalty", math.inf, "(0.0, inf)"),
        ("top_k", -1, "[0, inf)"),
        ("min_tokens", -2, "[0, inf)"),
        ("logprobs", -1, "[0, 100]"),
        ("logprobs", VOCAB_SIZE + 1, "[0, 100]"),
    ],
)
def test_what_has_none_is_refused_with_its_field_value_and_range(
    field: str, value: object, interval: str
):
    with pytest.raises(RequestError) as raised:
        check_params(SamplingParams(**{field: value}), VOCAB_SIZE)

    assert raised.value.param == field
    assert raised.value.message == f"{field} is {value}; give a finite number in {interval}"


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
@pytest.mark.parametrize("field", ["logit_bias", "prediction"])
def test_a_token_that_does_not_exist_is_refused(field: str, token: int):
    values = ((3, 1.0), (token, 1.0)) if field == "logit_bias" else (3, token, 4)
    with pytest.raises(RequestError) as raised:
        check_params(SamplingParams(**{field: values}), VOCAB_SIZE)

    assert raised.value.param == field
    assert raised.value.message == f"{field} names token {token}; the vocabulary is 0..99"


@pytest.mark.parametrize(
    ("param", "said", "fields"),
    [
        ("prediction", "has 32769 tokens; at most 32768", {"prediction": (1,) * 32769}),
        ("max_tokens", "is 1 and forced_ids are 2", {"forced_ids": (1, 2), "max_tokens": 1}),
        ("forced_ids", "whatever a grammar", {**FORCED, "grammar": GrammarSpec("regex", "a")}),
        *(
            ("logit_bias", r"in \(-inf, inf\)", {"logit_bias": ((3, value),)})
            for value in (math.nan, math.inf, -math.inf)
        ),
    ],
)
def test_what_cannot_be_served_names_its_field(param: str, said: str, fields: dict[str, Any]):
    with pytest.raises(RequestError, match=said) as raised:
        check_params(SamplingParams(**fields), VOCAB_SIZE)

    assert raised.value.param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
        ("repetition_penalty", 1.1),
        ("logit_bias", ((1, 1.0),)),
        ("min_tokens", 1),
        ("prediction", (1,)),
        ("forced_ids", (1,)),
        ("grammar", GrammarSpec("regex", "a")),
    ],
)
def test_a_search_ranks_by_the_models_own_law(field: str, value: object):
    with pytest.raises(RequestError, match="a beam search ranks texts") as found:
        check_params(SamplingParams(beams=BeamSpec(2), **{field: value}), VOCAB_SIZE)
    assert found.value.param == field
