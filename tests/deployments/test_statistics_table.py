"""What an answer says of its drafts stands in one table, which all pages and the document show."""

from __future__ import annotations

from typing import Any

import pytest
from openapi_spec_validator import validate

from cluster.coordinator.idle import IdleReason
from cluster.core import SpeculationStats
from deployments.ingress.api.openapi import openapi
from deployments.ingress.choice import combined
from deployments.ingress.usage import STATISTICS, WORDS
from docs.tools import api
from docs.tools.markdown import DOCS
from tests.deployments.test_openai_request import LIMITS

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
TOLD = [api.page(), api.REQUESTS.read_text("utf-8")]


@pytest.mark.parametrize("page", TOLD, ids=["api.md", "requests.md"])
def test_the_pages_have_every_statistic_and_every_word(page: str) -> None:
    assert all(f"| `{rule.name}` |" in page for rule in STATISTICS)
    assert set(WORDS["idle_because"]) == set(IdleReason)
    for words in WORDS.values():
        assert all(f'|  | `"{word}"` | {meaning} |' in page for word, meaning in words.items())


def test_the_document_says_the_same_of_every_answer_that_is_generated() -> None:
    document: Any = openapi(LIMITS, "1.0")
    validate(document)
    schema = document["components"]["schemas"]["SpeculativeDecoding"]
    assert list(schema["properties"]) == [rule.name for rule in STATISTICS]
    assert set(schema["properties"]["idle_because"]["enum"]) == {*IdleReason, None}
    for name, words in WORDS.items():
        described = schema["properties"][name]["description"]
        assert all(f"{word}: {meaning}" in described for word, meaning in words.items())
    for path in GENERATING:
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        answer = content["application/json"]["schema"]["properties"]
        found = answer["metrics"]["properties"]["speculative_decoding"]
        assert found == {"$ref": "#/components/schemas/SpeculativeDecoding"}


def test_requests_without_drafts_are_told_in_the_same_words_in_the_table_and_in_grpc() -> None:
    proto = (DOCS.parent / "protos/drafthouse/v1/generation.proto").read_text("utf-8")
    comment = proto.partition("// Reason for no speculative step")[2].partition("string")[0]
    assert all(f'"{reason}"' in comment for reason in IdleReason)


def test_the_statistics_of_several_choices_add_up() -> None:
    first = SpeculationStats(
        9,
        2,
        8,
        3,
        (0, 1, 1),
        {"lm": 2, "suffix": 1},
        "",
        {"lm": 6, "suffix": 4},
        {"suffix": 2},
        1.5,
    )
    second = SpeculationStats(4, 1, 2, 1, (0, 1), {"lm": 1}, "", {"lm": 2}, {}, 0.5)
    both = combined([first, second])
    assert sum(both.accepted_by_drafter.values()) == both.num_accepted_draft_tokens == 4
    assert both.shared_by_drafter == {"suffix": 2}
    assert both.verified_by_drafter == {"lm": 8, "suffix": 4}
    assert both.decode_time_s == 1.5
