"""`drafthouse chat`: what it asks, what it shows, and what stays on standard output alone."""

import io

import httpx
import pytest

from cluster.errors import WorkerError
from deployments.chat_command import ChatHistory
from deployments.cli import main, parser_for
from tests.deployments.conftest import Served
from tests.support.deployments.drafting_server import DraftingServer, Terminal


def server(owner: str = "drafthouse") -> DraftingServer:
    """It answers "a b" with one drafted token."""
    answer = [("a", []), (" b", ["lm"])], {"usage": {"completion_tokens": 2}}
    return DraftingServer(lambda body: answer, owner)


def conversation(asked: DraftingServer, *words: str, out: io.StringIO | None = None) -> ChatHistory:
    ticks = iter(range(1000))
    return ChatHistory(
        parser_for([]).parse_args(["chat", *words]),
        out or io.StringIO(),
        io.StringIO(),
        httpx.MockTransport(asked),
        lambda: float(next(ticks)),
    )


def test_a_conversation_goes_on_until_it_is_reset():
    asked = server()
    talk = conversation(asked, "--system", "be brief", "--seed", "3")
    talk.talk(iter(["one", "two", "/reset", "three", "/quit", "four"]))
    said = [[each["content"] for each in body["messages"]] for body in asked.bodies]
    assert said == [
        ["be brief", "one"],
        ["be brief", "one", "a b", "two"],
        ["be brief", "three"],
    ]
    assert asked.bodies[0]["seed"] == 3
    assert talk.out.getvalue() == "a b\n" * 3


def test_drafts_are_switched_on_and_off_on_a_server_of_ours_alone():
    asked = server()
    conversation(asked).talk(iter(["one", "/draft off", "two", "/draft on", "three"]))
    assert [body["speculation"]["enabled"] for body in asked.bodies] == [True, False, True]
    stranger = server("vllm")
    talk = conversation(stranger, "--no-drafts")
    talk.talk(iter(["one", "/draft maybe"]))
    assert not {"speculation", "return_draft_sources"} & stranger.bodies[0].keys()
    assert "is no Drafthouse, and drafts as it likes" in talk.notes.getvalue()
    assert "/draft on|off" in talk.notes.getvalue()


def test_on_a_terminal_drafted_text_has_its_drafter_s_colour_and_the_speed_is_said():
    out = Terminal()
    talk = conversation(server(), out=out)
    talk.ask("one")
    assert out.getvalue() == "a\x1b[32m b\x1b[0m\n"
    assert talk.notes.getvalue() == (
        "2 tokens, first after 1000 ms, 1.0 tokens/s; 1 drafted (lm 1)\n"
    )


def test_what_goes_wrong_is_said_and_not_kept():
    asked = server()
    talk = conversation(asked)
    talk.talk(iter(["refuse", "one"]))
    assert "refuses the question (HTTP status 400): not this" in talk.notes.getvalue()
    assert [each["content"] for each in asked.bodies[-1]["messages"]] == ["one"]
    with pytest.raises(WorkerError, match="not this"):
        talk.ask("refuse")


def test_a_real_server_answers_what_is_piped_in(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc abc abc"))
    assert main(["chat", served.http, "--max-tokens", "8", "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    assert "8 tokens, first after" in captured.err
