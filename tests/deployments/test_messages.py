"""/v1/messages with Anthropic's own client, in front of a real engine."""

from typing import Any

import anthropic
import pytest

from tests.support.deployments.api import Json
from tests.support.deployments.server import MODEL, Server

USER = {"role": "user", "content": "hello"}
ASKED = {
    "model": MODEL,
    "max_tokens": 12,
    "messages": [USER],
    "extra_body": {"temperature": 0},
}


@pytest.fixture
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def chat(server: Server, messages: list[Json], **fields: Any) -> Json:
    """What the chat endpoint answers to the same conversation."""
    asked = {"temperature": 0, "max_tokens": 12, "messages": messages, **fields}
    return server.ask("/v1/chat/completions", **asked)


def text_of(message: anthropic.types.Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def test_an_answer_is_that_of_the_chat(server: Server, client: anthropic.Anthropic):
    system = [{"type": "text", "text": "be brief"}]
    message = client.messages.create(**ASKED, system=system)
    wanted = chat(server, [{"role": "system", "content": "be brief"}, USER])
    assert text_of(message) == wanted["choices"][0]["message"]["content"]
    cached = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + cached == wanted["usage"]["prompt_tokens"]
    assert message.usage.output_tokens == wanted["usage"]["completion_tokens"]
    length = wanted["choices"][0]["finish_reason"] == "length"
    assert message.stop_reason == ("max_tokens" if length else "end_turn")


def test_the_clients_own_helper_reads_the_stream(client: anthropic.Anthropic):
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == text_of(last) == text_of(whole)
    assert last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens


def test_a_stop_sequence_ends_the_text_and_is_named(client: anthropic.Anthropic):
    text = text_of(client.messages.create(**ASKED))
    stop = text[2:4]
    message = client.messages.create(**ASKED, stop_sequences=[stop])
    assert text_of(message) == text[: text.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_an_answer_that_the_client_has_begun_is_continued(
    server: Server, client: anthropic.Anthropic
):
    begun = [USER, {"role": "assistant", "content": "It is"}]
    message = client.messages.create(**{**ASKED, "messages": begun})
    wanted = chat(server, begun, continue_final_message=True)["choices"][0]["message"]["content"]
    assert text_of(message) == wanted


def test_tokens_are_counted_before_anything_is_asked(client: anthropic.Anthropic):
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED["messages"])
    usage = client.messages.create(**ASKED).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_errors_are_anthropics(server: Server, client: anthropic.Anthropic):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASKED, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        client.messages.create(**ASKED, tools=[{"name": "f", "input_schema": {"type": "object"}}])
    answer = server.post("/v1/messages", messages=[USER])
    assert answer.status_code == 400
    found = answer.json()
    assert found["type"] == "error"
    assert found["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in found["error"]["message"]
    assert found["request_id"] == answer.headers["x-request-id"]
