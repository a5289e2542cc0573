"""What an answer says of its drafts: the same words in the table, the document and gRPC."""

from __future__ import annotations

from typing import Any

from cluster.coordinator.idle import IdleReason
from cluster.core import SpeculationStats
from deployments.ingress.api.openapi import openapi
from deployments.ingress.choice import combined
from docs.tools.markdown import DOCS
from tests.deployments.test_openai_request import LIMITS

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


def test_the_document_has_every_word_and_the_statistics_of_every_answer() -> None:
    document: Any = openapi(LIMITS, "1.0")
    schema = document["components"]["schemas"]["SpeculativeDecoding"]
    assert set(schema["properties"]["idle_because"]["enum"]) == {*IdleReason, None}
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
