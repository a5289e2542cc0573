"""What every HTTP request gets: an id, a deadline, CORS, headers without the white space around
their values (RFC 9110, 5.5); and the endpoints beside the texts."""

import logging
from collections.abc import Iterator

import httpx
import pytest
from openapi_spec_validator import validate

from deployments.ingress.http import create_app
from tests.support.deployments.server import MODEL, Server

LONG = {
    "model": MODEL,
    "prompt": "a",
    "temperature": 0,
    "max_tokens": 400,
    "ignore_eos": True,
}
ORIGIN = "https://page.example"


@pytest.fixture
def http(tool_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tool_server.url, timeout=60) as client:
        yield client


def test_every_name_is_listed_with_the_length_of_the_context(http: httpx.Client):
    cards = http.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [MODEL, "other"]
    assert {card["root"] for card in cards} == {MODEL}
    assert {card["max_model_len"] for card in cards} == {512}
    assert http.get("/v1/models/other").json() == cards[1]
    assert http.get("/v1/models/third").status_code == 404


def test_an_answer_has_the_name_that_its_request_used(http: httpx.Client):
    for name in (MODEL, "other"):
        asked = {**LONG, "model": name, "max_tokens": 1}
        assert http.post("/v1/completions", json=asked).json()["model"] == name


def test_the_document_names_every_path_and_no_other(tool_server: Server, http: httpx.Client):
    document = http.get("/openapi.json").json()
    validate(document)
    found = {
        (path, method.upper()) for path, methods in document["paths"].items() for method in methods
    }
    routes = {
        (route.path.replace(":path", ""), method)
        for route in create_app(tool_server.ingress).routes
        for method in route.methods - {"HEAD"}
        # What only servers with the page have; docs/events.md and docs/page.md tell of it.
        if not route.path.startswith(("/ui/static/", "/ui/events"))
    }
    assert found == routes


def test_tokens_go_to_text_and_back(tool_server: Server, http: httpx.Client):
    text = "Naïve text, <|end|> included."
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tool_server.ingress.tokenizer.encode(text).tolist()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    assert "<|end|>" in answer["token_strs"]
    back = http.post("/detokenize", json={"model": "other", "tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}


def test_load_balancers_and_people_learn_that_it_runs(http: httpx.Client):
    assert http.get("/ping").status_code == 200
    assert http.get("/version").json()["version"]
    for path in ("/ping", "/v1/models", "/version"):
        head = http.head(path)
        assert (head.status_code, head.content) == (200, b"")


def test_a_request_keeps_its_id_and_gets_one_without(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    asked = {**LONG, "max_tokens": 1}
    response = http.post("/v1/completions", json=asked, headers={"X-Request-Id": "mine-7"})
    assert response.headers["x-request-id"] == "mine-7"
    assert response.json()["id"] == "cmpl-mine-7"
    bad = http.post("/v1/completions", json={"model": "gpt"}, headers={"X-Request-Id": "mine-8"})
    assert bad.json()["request_id"] == "mine-8" == bad.headers["x-request-id"]
    for strange in ("a b", "x" * 129, 'quote"'):
        made = http.get("/nowhere", headers={"X-Request-Id": strange}).headers["x-request-id"]
        assert len(made) == 32
        assert strange not in caplog.text
    ours = [one.getMessage() for one in caplog.records if one.name.startswith("deployments")]
    assert any("id=mine-8 method=POST path=/v1/completions status=404" in line for line in ours)
    assert any("request id=cmpl-mine-7" in line for line in ours)
    assert not any("nowhere" in line for line in ours)


def test_a_page_from_a_known_origin_may_ask(http: httpx.Client):
    def preflight(origin: str) -> httpx.Response:
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        return http.options("/v1/completions", headers=asked)

    good = preflight(ORIGIN)
    assert good.status_code == 200
    assert good.headers["access-control-allow-origin"] == ORIGIN
    assert preflight("https://evil.example").status_code == 400
    answer = http.get("/v1/models", headers={"Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    plain = http.options("/v1/completions")
    assert (plain.status_code, plain.headers["allow"]) == (204, "POST, OPTIONS")
    kept = http.options("/v1/responses/resp_0")
    assert kept.headers["allow"] == "DELETE, GET, HEAD, OPTIONS", "of every route of the path"


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "9" * 13])
def test_a_time_that_is_none_is_refused(http: httpx.Client, value: str):
    response = http.post("/v1/completions", json=LONG, headers={"x-request-timeout-ms": value})
    assert (response.status_code, response.json()["error"]["param"]) == (
        400,
        "x-request-timeout-ms",
    )


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_given_up_everywhere(
    tool_server: Server, http: httpx.Client, stream: bool
):
    response = http.post(
        "/v1/completions", json={**LONG, "stream": stream}, headers={"x-request-timeout-ms": "30"}
    )
    if stream:
        assert response.status_code == 200
        assert '"code": "deadline_exceeded"' in response.text
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.status_code == 504
        assert "30" not in response.json()["error"]["message"].split("s;")[1]
    # Within the next round nothing of it is left: a request that waits for the place gets it.
    assert http.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200
    assert tool_server.coordinator.status()["num_running"] == 0
