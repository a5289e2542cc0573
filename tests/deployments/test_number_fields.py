"""Every number of a request at the edges of its type: a text, or a 400 that names the field."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.support.choices import by_day
from tests.support.deployments.server import MODEL

EDGES = ("true", "1e-46", "3.5e38", "NaN", "2147483648", "9" * 5000)
OTHERS = (
    "0",
    "-1",
    "1.0",
    '"1"',
    "5e-324",
    "1e400",
    "-Infinity",
    "18446744073709551616",
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
# Each field of a completion with a number in it, and what stands beside it.
MEMBERS = {
    **{
        name: f'"{name}": %s'
        for name in (
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "max_tokens",
            "min_tokens",
            "n",
            "best_of",
            "logprobs",
            "prompt_logprobs",
            "truncate_prompt_tokens",
        )
    },
    "temperature": '"temperature": %s, "min_p": 0.1',
    "top_p": '"top_p": %s, "temperature": 1e-46',
    "repetition_penalty": '"repetition_penalty": %s, "temperature": 0',
    "length_penalty": '"length_penalty": %s, "use_beam_search": true, "n": 2',
    "logit_bias": '"logit_bias": {"7": %s}',
    "stop_token_ids": '"stop_token_ids": [%s]',
    "speculation": '"speculation": {"max_draft_tokens": %s}',
}


@pytest.mark.parametrize("field", MEMBERS)
def test_a_completion_has_a_text_or_names_the_field(http: httpx.Client, field: str) -> None:
    start = f'{{"model": "{MODEL}", "prompt": "x y", "max_tokens": 2, '
    for number in by_day(EDGES, EDGES + OTHERS):
        text = start + MEMBERS[field] % number + "}"
        answer = http.post("/v1/completions", content=text)
        assert answer.status_code in (200, 400), (text[:200], answer.text)
        if answer.status_code == 400:
            assert answer.json()["error"]["param"].startswith(field), (text[:200], answer.text)
        else:
            assert "NaN" not in answer.text, text[:200]
            assert "Infinity" not in answer.text, text[:200]
            json.loads(answer.text)


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
