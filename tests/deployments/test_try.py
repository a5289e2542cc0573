"""`drafthouse try`: what it asks, what it shows, and that it does not keep quiet about a fault."""

import asyncio
import io
import json
import re
from collections.abc import Callable
from importlib.resources import files
from itertools import count

import httpx
import pytest

from cluster.errors import WorkerError
from cluster.requests.idle import MEANINGS, IdleReason
from deployments.chat_command import compare
from deployments.cli import parser_for
from tests.conftest import Run
from tests.deployments.conftest import Served
from tests.support.deployments.api import Json
from tests.support.deployments.drafting_server import Answer, Answering, DraftingServer, Terminal

URL = "http://server:8000"
STATISTICS = {
    "num_spec_steps": 2,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 10,
    "mean_acceptance_length": 2.5,
    "accepted_by_drafter": {"lm": 2, "suffix": 1},
    "shared_by_drafter": {"lm": 1},
    "decode_time_s": 0.5,
    "idle_because": None,
}
IDLE = {
    "num_spec_steps": 0,
    "accepted_by_drafter": {},
    "decode_time_s": 1.0,
    "idle_because": "paused",
}


def told(statistics: Json) -> Json:
    return {"metrics": {"speculative_decoding": statistics}}


def honest(body: Json) -> Answer:
    if not body["speculation"]["enabled"]:
        return [("a", []), (" b", []), (" c", [])], told(IDLE | {"idle_because": "disabled"})
    return [("a", []), (" b", ["lm"]), (" c", ["suffix", "lm"])], told(STATISTICS)


def tried(
    answers: Callable[[httpx.Request], httpx.Response],
    *words: str,
    out: io.StringIO | None = None,
) -> int:
    arguments = parser_for([]).parse_args(["try", URL, *words])
    transport = httpx.MockTransport(answers)
    return asyncio.run(compare(arguments, out or io.StringIO(), transport, count().__next__))


def ask(server: DraftingServer, *words: str) -> tuple[int, str]:
    out = io.StringIO()
    return tried(server, *(words or ("--prompt", "why?")), out=out), out.getvalue()


def answering(num_tokens: int, drafted_s: float | None, plain_s: float) -> Answering:
    """So many tokens both ways; how long the server says that they took, None = it does not."""

    def answer(body: Json) -> Answer:
        if body["speculation"]["enabled"]:
            statistics = {**STATISTICS, "decode_time_s": drafted_s}
        else:
            statistics = {**IDLE, "decode_time_s": plain_s}
        known = {name: value for name, value in statistics.items() if value is not None}
        return [(f" {index}", []) for index in range(num_tokens)], told(known)

    return answer


def rates(text: str) -> list[str]:
    """What is shown of both answers, and their ratio if it is."""
    lines = [line for line in text.splitlines() if line.startswith(("with", "ratio"))]
    return [line[20:28].strip() for line in lines]


def test_both_answers_are_asked_for_alike_and_neither_helps_the_other():
    server = DraftingServer(honest)
    words = ["--prompt", "why?", "--seed", "7", "--temperature", "0.5", "--api-key", "key"]
    assert ask(server, *words)[0] == 0
    _, drafted, plain, *again = server.bodies
    assert [each["speculation"]["enabled"] for each in again] == [False, True]
    assert drafted.pop("speculation") == {"enabled": True}
    assert plain.pop("speculation") == {"enabled": False}
    assert drafted.pop("cache_salt") != plain.pop("cache_salt")
    assert drafted == plain
    assert (plain["seed"], plain["temperature"]) == (7, 0.5)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer key"}


def test_it_shows_the_text_with_its_drafters_and_what_they_brought():
    status, text = ask(DraftingServer(honest))
    assert status == 0
    assert "a[lm| b][suffix| c]" in text
    assert "with speculation         4.0 tokens/s   first token after 1000 ms" in text
    assert "without                  2.0 tokens/s   first token after 1000 ms" in text
    assert "ratio  " not in text
    assert "(a ratio takes answers of 100 tokens or more: ask for a longer one)" in text
    assert "accepted 3 of 10 draft tokens (1 behind its end), 2.50 tokens per step with" in text
    assert "the 3 tokens of the text:" in text
    assert "lm                       1 (33 %), and 1 more that another drafted too" in text
    assert "suffix                   1 (33 %)\n" in text
    assert "the target itself        1 (33 %)\n" in text
    assert "both answers are the same text" in text
    assert "\x1b" not in text


def test_rates_are_tokens_over_the_time_between_the_steps_whenever_their_pieces_came():
    _, text = ask(DraftingServer(answering(101, 2.0, 4.0)))
    assert rates(text) == ["50.0", "25.0", "2.00"]
    assert "2.00 (2.00 to 2.00)\n" in text


@pytest.mark.parametrize(
    ("num_tokens", "drafted_s"), [(101, None), (101, 0.0), (2, 1e-9), (1, 0.0), (0, 0.0)]
)
def test_what_was_not_timed_has_no_rate_and_no_ratio(num_tokens: int, drafted_s: float | None):
    status, text = ask(DraftingServer(answering(num_tokens, drafted_s, 2.0)))
    assert status == 0
    assert rates(text) == ["-", f"{(num_tokens - 1) / 2.0:.1f}" if num_tokens > 1 else "-"]


def test_on_a_terminal_the_text_has_colours():
    out = Terminal()
    assert tried(DraftingServer(honest), "--prompt", "why?", out=out) == 0
    assert "a\x1b[32m b\x1b[0m\x1b[34m c\x1b[0m" in out.getvalue()


def test_answers_that_differ_are_said_loudly_and_are_a_failure():
    def lying(body: Json) -> Answer:
        return ([("x", [])], told(IDLE)) if body["speculation"]["enabled"] else honest(body)

    status, text = ask(DraftingServer(lying))
    assert status == 1
    assert "THE TWO ANSWERS DIFFER" in text
    assert "another time it was:\na b c" in text


def test_without_a_question_it_asks_one_of_the_page_s_as_the_page_does():
    presets = json.loads((files("deployments.page") / "static/presets.json").read_text())
    server = DraftingServer(honest)
    assert tried(server) == 0
    asked = server.bodies[0]["messages"][0]["content"]
    (preset,) = (each for each in presets if each["prompt"] == asked)
    shared = preset["fields"].keys() - {"max_tokens", "temperature"}
    assert all(body[name] == preset["fields"][name] for body in server.bodies for name in shared)


def test_a_request_without_a_draft_says_why():
    def idle(body: Json) -> Answer:
        return [("a", [])], told(IDLE)

    status, text = ask(DraftingServer(idle))
    assert status == 0
    assert "no draft was verified (paused): drafts have cost more time than they saved" in text
    assert set(MEANINGS) == set(IdleReason)


def test_a_model_that_takes_no_conversations_is_given_the_plain_text():
    server = DraftingServer(honest, has_template=False)
    assert ask(server)[0] == 0
    assert all(body["prompt"] == "why?" for body in server.bodies)


def test_a_server_that_is_not_there_or_refuses_is_named_with_the_remedy():
    def refusing(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        return httpx.Response(429, json={"error": {"message": "too many"}})

    with pytest.raises(WorkerError, match=r"refuses the question \(HTTP status 429\): too many"):
        tried(refusing)

    def absent(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(WorkerError, match="nothing answers at http://server:8000; start a server"):
        tried(absent)
    with pytest.raises(WorkerError, match="does not list a model"):
        tried(lambda request: httpx.Response(200, text="hello"))


def test_a_real_server_gives_the_same_text_both_ways(served: Served, run: Run):
    words = ["--prompt", "abc abc abc", "--max-tokens", "120", "--temperature", "0.7"]
    # No step waits for a drafter: on a busy machine an answer may be over before it was heard.
    for _ in range(10):
        text = run("try", f"{served.http}/v1", *words)
        assert "both answers are the same text" in text
        if "tokens per step with drafts" in text:
            break
    assert "tokens per step with drafts" in text
    assert "[" in text
    num_tokens = int(re.findall(r"the (\d+) tokens of the text:", text)[0])
    rows = [int(count) for count in re.findall(r"^  .{18} *(\d+) \(\d+ %\)", text, re.MULTILINE)]
    assert sum(rows) == num_tokens == 120
