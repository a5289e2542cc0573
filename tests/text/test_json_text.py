"""JSON that clients send: what is no value here, and how it is named."""

import json
import sys

import pytest

from cluster.errors import RequestError
from cluster.text.chat import tool_calls_of
from cluster.text.json_text import MAX_DEPTH, parse_json


def nested(depth: int) -> str:
    return '{"a":' * depth + "{}" + "}" * depth


def refusal(text: str, name: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_json(text, name)
    return caught.value


@pytest.mark.parametrize("written", ["5", '"x"', "null", "[1.5, true]", '{"a": [1e308, -5e-324]}'])
def test_a_value_is_that_of_the_text(written: str):
    assert parse_json(written, "field") == json.loads(written)


def test_values_may_be_as_deep_as_the_limit_and_no_deeper():
    assert parse_json(nested(MAX_DEPTH - 1), "") == json.loads(nested(MAX_DEPTH - 1))
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH, "")
    wide = json.dumps({"messages": [{"content": "{"}] * 1000})
    assert len(parse_json(wide, "")["messages"]) == 1000
    # Beyond what Python's own reader can do, too.
    for depth in (MAX_DEPTH, 500, 100_000):
        error = refusal(nested(depth), "field")
        assert (error.param, "nested too deeply" in error.message) == ("field", True)


def test_a_deep_part_of_a_body_is_named_by_where_it_begins():
    tool = {"function": {"parameters": json.loads(nested(200))}}
    error = refusal(json.dumps({"model": "m", "tools": [{}, tool]}), "")
    assert error.param == "tools[1].function.parameters"
    assert len(error.message) < 200
    assert refusal(nested(100_000), "").param is None


NUMBERS = [
    ('{"temperature": NaN}', "temperature", "NaN"),
    ('{"temperature": 1e400}', "temperature", "1e400"),
    ('{"a": {"b": [1, {"maximum": -1e400}]}}', "a.b[1].maximum", "-1e400"),
    ('{"a": [-Infinity]}', "a[0]", "-Infinity"),
    ('{"seed": %s}' % ("9" * (sys.get_int_max_str_digits() + 1)), "seed", "4301 characters"),
]


@pytest.mark.parametrize(("body", "param", "shown"), NUMBERS)
def test_a_number_that_is_none_is_named(body: str, param: str, shown: str):
    error = refusal(body, "")
    assert (error.param, shown in error.message) == (param, True)
    assert refusal(body, "field").param == "field"


def test_a_number_that_a_later_one_replaces_is_refused_too():
    assert "no finite number" in refusal('{"a": NaN, "a": 1}', "").message


HALF = "\\ud83d"  # of a surrogate pair: JSON can escape it, and UTF-8 cannot have it


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"prompt": ["a", "x%s y"]}', "prompt[1]"),
        ('{"tools": [{"function": {"a": {"b": "%s"}}}]}', "tools[0].function.a.b"),
        ('{"metadata": {"%s": "x"}}', "metadata"),
        ('"%s"', None),
    ],
)
def test_half_a_character_is_refused_wherever_it_stands(body: str, param: str | None):
    error = refusal(body % HALF, "")
    assert error.message.startswith(f"{param or 'the body'}: contains half of a surrogate pair")
    assert error.param == param
    assert refusal(body % HALF, "field").param == "field"
    assert parse_json(body % (HALF + "\\ude42"), "")
    assert parse_json(body % f"\\{HALF}", "")


def test_what_is_no_json_is_told_without_its_text():
    error = refusal('{"secret', "field")
    assert error.param == "field"
    assert "line 1 column 2" in error.message
    assert "secret" not in error.message
    assert refusal("", "").message.startswith("the body is not valid JSON")


@pytest.mark.parametrize("arguments", [nested(500), nested(100_000), '{"a": 1e400}', f'["{HALF}"]'])
def test_arguments_of_calls_are_read_by_the_same_rules(arguments: str):
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(RequestError) as caught:
        tool_calls_of([call], "messages[1].tool_calls")
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"
