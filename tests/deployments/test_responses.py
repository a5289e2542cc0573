"""/v1/responses with OpenAI's own client, in front of a real engine."""

from typing import Any

import pytest
from openai import NotFoundError as NotFound
from openai import OpenAI

from cluster.errors import NotFoundError
from deployments.ingress.spec import ResponseStore, StoredResponse
from tests.support.deployments.server import MODEL, Server

ASKED = {
    "model": MODEL,
    "temperature": 0,
    "max_output_tokens": 12,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture
def openai(tool_server: Server) -> OpenAI:
    return OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", timeout=60, max_retries=0)


def chat_text(tool_server: Server, messages: list[dict[str, Any]]) -> str:
    """What the chat endpoint answers to the same conversation."""
    asked = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "messages": messages}
    answer = tool_server.ask("/v1/chat/completions", **asked)
    return answer["choices"][0]["message"]["content"]


def test_an_answer_is_that_of_the_chat(tool_server: Server, openai: OpenAI):
    answer = openai.responses.create(
        **ASKED, input="hello", instructions="be brief", metadata={"a": "b"}
    )
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert answer.output_text == chat_text(tool_server, messages)
    assert (answer.status, answer.metadata) == ("incomplete", {"a": "b"})
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12
    assert "speculative_decoding" in answer.model_extra["metrics"]


def test_a_stream_has_openais_events_in_order(openai: OpenAI):
    asked = {**ASKED, "input": "hello"}
    openai.responses.create(**asked)  # from now on its prompt is in the prefix cache
    whole = openai.responses.create(**asked)
    events = list(openai.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == text
    assert last.response.usage == whole.usage


def test_a_conversation_goes_on_after_an_answer_that_is_kept(tool_server: Server, openai: OpenAI):
    first = openai.responses.create(**ASKED, input="hello", instructions="only for once")
    second = openai.responses.create(**ASKED, input="and then?", previous_response_id=first.id)
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and then?"},
    ]
    assert second.output_text == chat_text(tool_server, messages)
    assert second.previous_response_id == first.id
    assert openai.responses.retrieve(first.id).output_text == first.output_text
    stateless = openai.responses.create(**ASKED, input=messages)
    assert stateless.output_text == second.output_text
    openai.responses.delete(first.id)
    with pytest.raises(NotFound, match="previous_response_id"):
        openai.responses.create(**ASKED, input="x", previous_response_id=first.id)


def test_an_answer_is_kept_only_where_that_is_wanted_under_an_id_that_nobody_chooses(
    openai: OpenAI,
):
    headers = {"X-Request-Id": "guess-me"}
    answer = openai.responses.create(**ASKED, input="hello", store=False, extra_headers=headers)
    assert "guess-me" not in answer.id
    with pytest.raises(NotFound):
        openai.responses.retrieve(answer.id)


def test_log_probabilities_stand_beside_the_text(openai: OpenAI):
    answer = openai.responses.create(
        **ASKED,
        input="hello",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    (item,) = answer.output
    found = item.content[0].logprobs
    assert len(found) == 12
    assert all(len(one.top_logprobs) == 2 for one in found)


def test_the_store_is_bounded_and_the_oldest_go_first():
    few = ResponseStore(max_responses=3, max_bytes=1000)
    for number in range(4):
        few.put(StoredResponse({"id": f"r{number}"}, ()))
    with pytest.raises(NotFoundError):
        few.get("r0", "", "response_id")
    assert few.get("r1", "", "response_id").body == {"id": "r1"}
    store = ResponseStore(max_responses=100, max_bytes=1000)
    for number in range(20):
        store.put(StoredResponse({"id": f"r{number}"}, ({"role": "user", "content": "x" * 200},)))
        assert store.num_bytes <= 1000
    store.put(StoredResponse({"id": "huge"}, ({"role": "user", "content": "x" * 2000},)))
    with pytest.raises(NotFoundError):
        store.get("huge", "", "response_id")
    for number in range(16, 20):
        store.drop(f"r{number}", "", "response_id")
    assert store.num_bytes == 0
