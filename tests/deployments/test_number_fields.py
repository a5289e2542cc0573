"""Every number of a request at the edges of its type: a text, or a 400 that names the field.

Each field meets all EDGES and a quarter of the OTHERS, each of which meets every fourth field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.client import Client, GenerateRequest, InvalidRequestError, SamplingOptions
from cluster.client.generated.common_pb2 import BeamSearch
from tests.support.deployments.server import MODEL

EDGES = (
    "0",
    "-1",
    "1.0",
    "true",
    '"1"',
    "5e-324",
    "1e-46",
    "3.5e38",
    "1e400",
    "NaN",
    "-Infinity",
    "2147483648",
    "18446744073709551616",
    "9" * 5000,
)
OTHERS = (
    "-0.0",
    "1",
    "2",
    "2.0000000000000004",
    "0.9999999999999999",
    "-5e-324",
    "1e-45",
    "1e-38",
    "1.1754943e-38",
    "1e-30",
    "1e38",
    "1e308",
    "-1e308",
    "-1e400",
    "Infinity",
    "2147483647",
    "-2147483649",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "-9223372036854775808",
    "9223372036854775808",
    "18446744073709551615",
    "9" * 400,
)
# The fields of a completion, with what stands beside each.
FIELDS = {
    "temperature": '"min_p": 0.1',
    "top_p": '"temperature": 1e-46',
    "top_k": "",
    "min_p": "",
    "presence_penalty": "",
    "frequency_penalty": "",
    "repetition_penalty": '"temperature": 0',
    "seed": "",
    "max_tokens": "",
    "min_tokens": "",
    "n": "",
    "best_of": "",
    "logprobs": "",
    "prompt_logprobs": "",
    "truncate_prompt_tokens": "",
    "length_penalty": '"use_beam_search": true, "n": 2',
}
NESTED = {
    "logit_bias": '"logit_bias": {"7": %s}',
    "stop_token_ids": '"stop_token_ids": [%s]',
    "speculation": '"speculation": {"max_draft_tokens": %s}',
}


def numbers(place: int) -> tuple[str, ...]:
    """Those that the field in this place meets."""
    return EDGES + OTHERS[place % 4 :: 4]


def check(http: httpx.Client, path: str, members: list[str], field: str) -> None:
    text = "{" + ", ".join(one for one in members if one) + "}"
    answer = http.post(path, content=text)
    assert answer.status_code in (200, 400), (text[:200], answer.text)
    if answer.status_code == 400:
        assert answer.json()["error"]["param"].startswith(field), (text[:200], answer.text)
    else:
        assert "NaN" not in answer.text, text[:200]
        assert "Infinity" not in answer.text, text[:200]
        json.loads(answer.text)


@pytest.mark.parametrize("field", [*FIELDS, *NESTED])
def test_a_completion_has_a_text_or_names_the_field(http: httpx.Client, field: str) -> None:
    for number in numbers([*FIELDS, *NESTED].index(field)):
        member = NESTED[field] % number if field in NESTED else f'"{field}": {number}'
        more = FIELDS.get(field, "")
        least = "" if field in ("max_tokens", "min_tokens") else '"max_tokens": 2'
        members = [f'"model": "{MODEL}"', '"prompt": "x y"', member, more, least]
        check(http, "/v1/completions", members, field)


@pytest.mark.parametrize("number", ["1e400", "NaN", "-Infinity", "9" * 5000])
def test_a_number_in_a_schema_is_one(http: httpx.Client, number: str) -> None:
    schema = f'{{"type": "number", "maximum": {number}}}'
    for form, field in (
        (f'"structured_outputs": {{"json": {schema}}}', "structured_outputs.json"),
        (f'"structured_outputs": {{"json": {json.dumps(schema)}}}', "structured_outputs.json"),
        (
            f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}',
            "response_format.json_schema.schema",
        ),
    ):
        answer = http.post(
            "/v1/completions", content=f'{{"model": "{MODEL}", "prompt": "x", {form}}}'
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(field)


@pytest.fixture(scope="module")
def client(grpc_address: str) -> Iterator[Client]:
    with Client(grpc_address) as connected:
        yield connected


DOUBLES = (
    0.0,
    -0.0,
    1.0,
    2.0,
    5e-324,
    -5e-324,
    1e-46,
    1e-38,
    1.0 - 2**-53,
    3.5e38,
    1.7e308,
    -1.7e308,
    math.nan,
    math.inf,
    -math.inf,
)
INTEGERS = (0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1)
OVER_GRPC: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ),
        DOUBLES,
    ),
    **dict.fromkeys(("top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"), INTEGERS),
    "seed": (*INTEGERS, 2**63, 2**64 - 1),
    "logit_bias": tuple({7: value} for value in DOUBLES),
    "beam_search": tuple(BeamSearch(num_beams=2, length_penalty=value) for value in DOUBLES),
}


@pytest.mark.parametrize("field", OVER_GRPC)
def test_a_call_has_a_text_or_names_the_field(client: Client, field: str) -> None:
    for value in OVER_GRPC[field]:
        given: dict[str, Any] = {field: value}
        if field == "temperature":
            given["min_p"] = 0.1
        if field not in ("max_tokens", "min_tokens"):
            given["max_tokens"] = 2
        request = GenerateRequest(model=MODEL, text="x", sampling=SamplingOptions(**given))
        named = "length_penalty" if field == "beam_search" else field
        outcome = outcome_of(client, request)
        is_named = named in outcome
        assert outcome == "text" or is_named, (value, outcome)


def outcome_of(client: Client, request: GenerateRequest) -> str:
    """ "text", or the field that is named; any other error fails the test."""
    try:
        client.complete(request, timeout_s=60)
    except InvalidRequestError as error:
        return error.param or str(error)
    return "text"
