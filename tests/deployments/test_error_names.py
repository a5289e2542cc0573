"""An error names the field of the body that it is about, whatever else is made of that body."""

import re
from typing import Any

import pytest

from cluster.errors import RequestError
from deployments.ingress.wording import Names
from tests.deployments.test_wrong_fields import BODIES
from tests.support.choices import pairwise
from tests.support.deployments.server import Server

USER = {"role": "user", "content": "hi"}
LONG = "word " * 9000
# What is found when a prompt is rendered and counted, and a grammar compiled; what the body alone
# shows is in test_wrong_fields.py.
CASES = [(path, *case) for path, listed in BODIES["served"].items() for case in listed]
CASES += [
    ("/tokenize", "messages", {"messages": [{**USER, "content": LONG}]}),
    ("/tokenize", "prompt", {"prompt": LONG}),
    ("/v1/responses", "input", {"input": "x", "instructions": LONG}),
]


@pytest.mark.parametrize(("path", "param", "body"), CASES)
def test_an_error_names_the_field_of_its_own_body(
    tool_server: Server, path: str, param: str, body: dict[str, Any]
):
    error = tool_server.refusal(path, **body)
    assert error.get("param", param) == param  # Anthropic's errors have none
    assert error["message"].startswith(f"{param}: ")


# Where each body has its prompt, a short one, and what bounds its output.
PLACES = {
    "/v1/completions": ("prompt", lambda text: text, "max_tokens"),
    "/v1/chat/completions": ("messages", lambda text: [{**USER, "content": text}], "max_tokens"),
    "/v1/responses": ("input", lambda text: text, "max_output_tokens"),
    "/v1/messages": ("messages", lambda text: [{**USER, "content": text}], "max_tokens"),
}
CONTEXT = 512
TOO_LONG = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")


# count: too many by its tokens, and by its characters alone.
@pairwise(path=[*PLACES, "tokens"], streams=[False, True], count=[CONTEXT, 9_000])
def test_a_full_context_has_the_code_that_clients_act_on(
    tool_server: Server, path: str, streams: bool, count: int
):
    path, by_tokens = ("/v1/completions", True) if path == "tokens" else (path, False)
    own, said, length = PLACES[path]
    prompt = [5] * count if by_tokens else said("word " * count)
    body = {own: prompt, length: 4, "stream": streams}
    if path == "/v1/responses" and streams:
        # OpenAI's own agent reads the code in the event alone.
        first, *_, last = tool_server.stream(path, **body)
        assert (first["type"], last["type"]) == ("response.created", "response.failed")
        error = {**last["response"]["error"], "type": "invalid_request_error"}
    else:
        error = tool_server.refusal(path, **body)
    assert error["type"] == "invalid_request_error"
    if path == "/v1/messages":
        found = TOO_LONG.match(error["message"])
    else:
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {CONTEXT} tokens" in error["message"]
        found = TOO_LONG.search(error["message"])
        assert error.get("param", own) == own
    assert int(found[1]) > int(found[2]) == CONTEXT - 1


@pytest.mark.parametrize("path", PLACES)
def test_more_output_than_fits_is_as_much_as_fits(tool_server: Server, path: str):
    own, said, length = PLACES[path]
    # Of a context that is nearly full: what fits is written within a moment.
    body = {own: said("word " * 90), length: 2**31 - 1, "temperature": 0}
    usage = tool_server.ask(path, **body)["usage"]
    assert 0 < usage.get("completion_tokens", usage.get("output_tokens")) < CONTEXT


def test_only_the_name_in_front_is_the_bodys_own():
    names = Names({"messages": "input", "messages[1]": "input[4]", "stop": "stop_sequences"})
    with (
        pytest.raises(RequestError) as caught,
        names.told(),
    ):
        raise RequestError("messages[1].role: messages stop: here", param="messages[1].role")
    assert caught.value.param == "input[4].role"
    assert caught.value.message == "input[4].role: messages stop: here"
    assert names.of("stop_token_ids") == "stop_token_ids"
    assert names.of("messages[10].content") == "input[10].content"
