"""Structural tags: what is none is told by its place, and nothing of them is left out."""

from typing import Any

import pytest

from cluster.grammar.lark import structural_tag_to_lark

TAG = {
    "type": "tag",
    "begin": "<a>",
    "content": {"type": "any_text"},
    "end": "</a>",
}


def of_format(format_: dict[str, Any]) -> str:
    return structural_tag_to_lark({"type": "structural_tag", "format": format_}, {})


@pytest.mark.parametrize("value", [0, False, [], {}])
def test_what_is_no_text_is_not_taken_for_none(value: Any):
    with pytest.raises(ValueError, match=r"format\.end is not a text"):
        of_format({**TAG, "end": value})
    tags = {"type": "tags_with_separator", "tags": [TAG], "separator": value}
    with pytest.raises(ValueError, match=r"format\.separator is not a text"):
        of_format(tags)


def test_null_is_the_same_as_no_text():
    tags = {"type": "tags_with_separator", "tags": [TAG]}
    assert of_format({**tags, "separator": None}) == of_format(tags)


@pytest.mark.parametrize("structure", [0, None, "x"])
def test_a_structure_that_is_none_is_not_left_out(structure: Any):
    real = {"begin": "<a>", "schema": {}, "end": "</a>"}
    asked = {"structures": [real, structure], "triggers": ["<a>"]}
    with pytest.raises(ValueError, match="not an object"):
        structural_tag_to_lark(asked, {})
