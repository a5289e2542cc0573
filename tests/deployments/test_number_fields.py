"""Every number of a request at the edges of its type: a text, or a 400 that names the field."""

import json

import httpx
import pytest

from tests.deployments.test_wrong_fields import BODIES
from tests.support.choices import by_day
from tests.support.deployments.server import MODEL

NUMBERS = BODIES["numbers"]
EDGES = (*NUMBERS["edges"], "9" * 5000)
OTHERS = (*NUMBERS["others"], "9" * 400)
MEMBERS = {name: f'"{name}": %s' for name in NUMBERS["plain"]} | NUMBERS["members"]


@pytest.mark.parametrize("field", MEMBERS)
def test_a_completion_has_a_text_or_names_the_field(http: httpx.Client, field: str):
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
def test_a_number_in_a_schema_is_one(http: httpx.Client, number: str):
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
