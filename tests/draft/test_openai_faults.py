"""An engine that drafts over HTTP and fails, floods or lies costs its own drafts alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.models.token_bytes import TokenBytes
from tests.support.draft.author import Author, grow
from tests.support.draft.openai_stage import DEMO, PROMPT, WHOLE, Stage, stage, told
from tests.support.draft.scripted_engine import (
    Script,
    continues,
    event,
    head,
    says,
    scripted,
    sends,
)


@pytest.fixture(scope="module")
def tokenizer() -> TokenBytes:
    return TokenBytes.load(DEMO)


def _flood(body: dict[str, Any]) -> Any:
    async def script() -> Any:
        yield head()
        while True:
            yield event("flood and flood ")

    return script()


def _never(body: dict[str, Any]) -> Any:
    async def script() -> Any:
        while True:
            yield b"HTTP/1.1 100 Continue\r\n\r\n"

    return script()


SSE = head()
HOSTILE: dict[str, tuple[Script, str]] = {
    "an error": (sends(head("500 Oops"), b"secret fox"), "HTTP status 500"),
    "too many requests": (sends(head("429 No", "Retry-After: 999999")), "HTTP status 429"),
    "a redirect": (sends(head("307 There", "Location: http://169.254.169.254/")), "status 307"),
    "no HTTP": (sends(b"\x00\xff" * 9), "RemoteProtocolError"),
    "nothing": (sends(), "RemoteProtocolError"),
    "a head without end": (sends(b"HTTP/1.1 200 OK\r\n", *[b"a: b\r\n"] * 40_000), "Error"),
    "heads without end": (_never, "within 2 s"),
    "no JSON": (sends(SSE, b"data: secret fox\n\n"), "its answer is no completion"),
    "other JSON": (sends(SSE, b"data: [1, 2]\n\n"), "its answer is no completion"),
    "no text": (sends(SSE, b'data: {"choices": [{"text": 7}]}\n\n'), "is no completion"),
    "deep JSON": (sends(SSE, b"data: " + b"[" * 15_000 + b"\n\n"), "is no completion"),
    "no UTF-8": (sends(SSE, b'data: {"choices": [{"text": "\xff"}]}\n\n'), "no completion"),
    "no stream": (sends(head(), b'{"choices": [{"text": "secret fox"}]}'), "breaks off"),
    "no words": (says(""), "its answer is empty"),
    "a line without end": (sends(SSE, *[b"data: " + b"x" * 65_536] * 9), "is too long"),
    "comments without end": (sends(SSE, *[b": x\n" * 16_384] * 99), "is too long"),
    "packed": (sends(head("200 OK", "Content-Encoding: gzip"), b"\x1f\x8b" * 99), "breaks off"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_engine_that_fails_costs_its_own_drafts_alone(
    tokenizer: TokenBytes, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    script, why = HOSTILE[what]
    author = Author(tokenizer.encode(PROMPT))
    with stage(script, timeout_s=2.0) as running:
        running.open(author)
        running.settle(author, lambda: bool(told(caplog)))
        assert why in told(caplog)
        assert running.drafter.engine_faults == 1
        assert "secret" not in caplog.text
        assert len({request["prompt"] for request in running.engine.requests}) == 1
        running.engine.script, running.now = continues(WHOLE), 60.0
        other = Author(tokenizer.encode(PROMPT), request_id="b")
        running.open(other)
        assert len(running.grown(other).tree)


@pytest.mark.parametrize(
    ("script", "drafted"),
    [
        (_flood, b" fox"),
        (says(" fox jumps \ufffd over it", " and more"), b" fox jumps"),
        (sends(SSE, b'data: {"choices": [{"text": " fox jumps \\ud83d over"}]}\n\n'), b" fox"),
    ],
    ids=["a flood", "broken UTF-8", "half a character"],
)
def test_of_an_answer_that_is_partly_sound_that_part_is_drafted(
    tokenizer: TokenBytes, script: Script, drafted: bytes
) -> None:
    author = Author(tokenizer.encode(PROMPT))
    with stage(script, max_tokens=8) as running:
        running.open(author)
        request = next(iter(running.drafter._requests))
        running.settle(author, lambda: request.draft is not None and request.answer is None)
        assert request.draft is not None
        assert len(request.draft.rest) <= 8 * 16
        if script is not _flood:
            assert tokenizer.decode(request.draft.chain).startswith(drafted)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_text_that_the_engine_refuses_is_not_asked_for_again(
    tokenizer: TokenBytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    long, other = (Author(tokenizer.encode(PROMPT), request_id=name) for name in "ab")
    with stage(sends(head(f"{status} No"), json.dumps({"error": PROMPT}).encode())) as running:
        running.open(long)
        running.settle(long, lambda: bool(told(caplog)))
        running.commit(long, tokenizer.encode(" fox"))
        assert grow(running.drafter, long) == {}
        assert len(running.engine.requests) == 1
        assert PROMPT not in caplog.text
        running.engine.script = continues(WHOLE)
        running.open(other)
        assert len(running.grown(other).tree)


def test_an_address_where_nobody_answers_is_an_engine_that_fails(
    tokenizer: TokenBytes, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted(says()) as engine:
        running = Stage(engine)
    author = Author(tokenizer.encode(PROMPT))
    running.open(author)
    for _ in range(3):
        running.settle(author, lambda: bool(told(caplog)))
        running.commit(author, tokenizer.encode(" fox"))
    assert "ConnectError" in told(caplog)
    running.drafter.release(["a"])
