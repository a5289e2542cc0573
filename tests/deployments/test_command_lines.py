"""What no command can do anything with: one line on stderr, before any work, and the exit code."""

import io
import shlex
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from cluster.errors import WorkerError
from deployments.chat_command import ChatHistory
from deployments.cli import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_UNREAD, parser_for
from deployments.openai_client import OpenAIServer
from tests.conftest import Run, command, python
from tests.support.choices import by_day
from tests.support.deployments.scripted_server import in_virtual_time

# Nothing listens there; a value that is taken ends in a connection refused.
URL = "http://127.0.0.1:9"
REFUSED = yaml.safe_load(Path(__file__).with_name("command_lines.yaml").read_text("utf-8"))
REFUSED["try --prompt a\udcff"] = "not valid UTF-8"  # which is no YAML


@pytest.mark.parametrize("words", REFUSED)
def test_a_value_that_means_nothing_is_refused_in_one_line_before_any_work(words: str, run: Run):
    (line,) = run(*shlex.split(words), status=EXIT_BAD_CONFIG).splitlines()
    assert line.startswith("drafthouse: ")
    assert REFUSED[words] in line


SHELL = [
    ("models > /dev/full", EXIT_FAILED, "No space left on device"),
    ("models >&-", EXIT_FAILED, "Bad file descriptor"),
    ("models 2>&-", 0, ""),
    ("models | true; exit ${PIPESTATUS[0]}", EXIT_UNREAD, ""),
    ("chat <&-", EXIT_BAD_CONFIG, "the question is empty"),
    ("chat < /dev/null", EXIT_BAD_CONFIG, "the question is empty"),
    (r"chat < <(printf 'caf\xe9?')", EXIT_BAD_CONFIG, "not valid UTF-8, at 'caf"),
    (r"try --prompt $'caf\xe9?'", EXIT_BAD_CONFIG, "not valid UTF-8, at 'caf"),
    ("fetch smollm2-é-none", EXIT_BAD_CONFIG, "smollm2"),
]


@pytest.mark.parametrize(("shell", "status", "told"), by_day(SHELL[::2], SHELL))
def test_files_and_pipes_that_cannot_be_used_are_said_in_one_line(
    shell: str, status: int, told: str
):
    found = command(
        "bash", "-c", f"$DRAFTHOUSE {shell}", DRAFTHOUSE=f"{sys.executable} -m deployments.cli"
    )
    assert found.returncode == status, found.stderr
    assert told in found.stderr
    assert len(found.stderr.splitlines()) == bool(told), found.stderr


class Notes(io.StringIO):
    @property
    def said(self) -> list[str]:
        return self.getvalue().splitlines(keepends=True)


def test_a_line_of_a_conversation_that_is_no_text_is_noted_and_the_conversation_goes_on():
    notes = Notes()
    talk = ChatHistory(parser_for(["chat"]).parse_args(["chat", URL]), Notes(), notes)
    talk.talk(iter(["caf\udce9", "/reset"]))
    assert notes.said[-2:] == ["the line is not valid UTF-8\n", "the conversation begins anew\n"]


def test_a_server_that_wants_a_key_is_not_taken_for_another_kind():
    async def ask(status: int) -> None:
        def answer(request: httpx.Request) -> httpx.Response:
            return httpx.Response(status, json={"error": {"message": "who are you?"}})

        async with OpenAIServer(URL, "", httpx.MockTransport(answer)) as server:
            await server.model()

    for status in (401, 403):
        with pytest.raises(WorkerError, match=r"who are you\?; give a key .* by --api-key"):
            in_virtual_time(ask(status))
    with pytest.raises(WorkerError, match="HTTP status 503"):
        in_virtual_time(ask(503))
    with pytest.raises(WorkerError, match="is this an OpenAI-compatible server"):
        in_virtual_time(ask(404))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_code(shell: str, run: Run):
    assert "drafthouse" in run("completion", shell)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("drafthouse serve demo-target --max-model", {"--max-model-len "}),
        ("drafthouse serve --log-format ", {"text", "json"}),
    ],
)
def test_what_may_follow_is_offered(line: str, expected: set[str]):
    """As the shell asks, which reads the answer from another stream than the output."""
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout",
    }
    done = python("-m", "deployments.cli", **asked)
    assert {*done.stdout.splitlines()} == expected, done.stderr
