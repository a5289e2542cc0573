"""Clients that others wrote are run so that none can spoil the run: limits, reasons, the table."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.clients.agents import row_of_agent
from benchmarks.clients.environments import Environments, Unavailable
from benchmarks.clients.plan import CLIENTS, Client, Command, Setting
from benchmarks.clients.report import publish, read_rows
from benchmarks.clients.running import Row, rows_of
from benchmarks.support.processes import is_alive
from tests.support.agents.plan import AGENTS

SCRIPT = """
import json, sys
assert sys.argv[1:] == ["http://host", "toy"]
print("chatter")
print(json.dumps({"check": "one", "error": "", "seconds": 1.5}))
print(json.dumps({"check": "two", "error": "bad\\n  news", "seconds": 0.1}))
"""


# It asks and does as it is told; where 1 == 2, something that it asks is refused.
AGENT = """
import json, subprocess, sys, urllib.request

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
told = [{"role": "user", "content": "go on"}]

def ask(**more):
    asked = {"model": "drafthouse", "messages": told, "tools": [TOOL], **more}
    request = urllib.request.Request(
        sys.argv[1] + "/v1/chat/completions", json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]

for step in range(3):
    if step == 2 and not 1 == 1:
        ask(max_tokens=-1)
    said = ask()
    told.append(said)
    for one in said["tool_calls"]:
        command = json.loads(one["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        told.append({"role": "tool", "tool_call_id": one["id"], "content": done.stdout})
"""


class Installed(Environments):
    """Whatever is asked for is there."""

    def folder(self, name: str, requirements: Sequence[str], *, is_of_npm: bool = False) -> Path:
        return Path("unused")


class Here(Environments):
    """This interpreter's own environment, for every client."""

    def __init__(self) -> None:
        super().__init__(Path("unused"), None)

    def bin(self, client: Client) -> Path:
        return Path(sys.executable).parent


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting("http://host", "toy", tmp_path, tmp_path / "work")


def scripted(text: str, tmp_path: Path, **fields: object) -> Client:
    script = tmp_path / "script.py"
    script.write_text(text)
    return Client("it", "pytest", ("pytest",), str(script), **fields)  # type: ignore[arg-type]


def commanded(code: str, *shows: str, timeout_s: float = 60.0) -> Client:
    command = Command("it", lambda _: ["python", "-c", code], shows)
    return Client("it", "pytest", ("pytest",), (command,), timeout_s=timeout_s)


def test_each_check_of_a_script_is_a_row(tmp_path: Path, setting: Setting) -> None:
    one, two = rows_of(scripted(SCRIPT, tmp_path), Here(), setting)
    assert (one.check, one.result, one.note, one.seconds) == ("one", "passed", "", 1.5)
    assert (two.check, two.result, two.note) == ("two", "failed", "bad news")
    assert one.version == pytest.__version__
    assert two.is_failure


def test_a_script_that_falls_over_says_so_beside_what_it_did(
    tmp_path: Path, setting: Setting
) -> None:
    rows = rows_of(scripted(SCRIPT + "raise SystemExit('gone')", tmp_path), Here(), setting)
    assert [row.result for row in rows] == ["passed", "failed", "failed"]
    assert "exit status 1" in rows[-1].note
    assert "gone" in rows[-1].note


def test_a_client_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, setting: Setting
) -> None:
    child = tmp_path / "child"
    code = (
        "import subprocess, pathlib, time; one = subprocess.Popen(['sleep', '600']);"
        f" pathlib.Path({str(child)!r}).write_text(str(one.pid)); time.sleep(600)"
    )
    started_at = time.monotonic()
    (row,) = rows_of(commanded(code, timeout_s=3.0), Here(), setting)
    assert time.monotonic() - started_at < 60.0
    assert row.result == "failed"
    assert row.note.startswith("it took too long")
    deadline = time.monotonic() + 20.0
    while is_alive(int(child.read_text())):
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("code", "result", "note"),
    [
        ("print('all done')", "passed", ""),
        ("print('nothing')", "failed", "lacks 'all done'"),
        ("print('all done'); raise SystemExit(3)", "failed", "exit status 3"),
    ],
)
def test_a_command_must_end_well_and_show_what_it_should(
    code: str, result: str, note: str, setting: Setting
) -> None:
    (row,) = rows_of(commanded(code, "all done"), Here(), setting)
    assert row.result == result
    assert note in row.note


def test_a_failure_that_is_explained_is_none_of_ours(tmp_path: Path, setting: Setting) -> None:
    client = scripted(SCRIPT, tmp_path, explained={"two": "it asks for the moon", "one": "unused"})
    one, two = rows_of(client, Here(), setting)
    assert (one.result, one.note) == ("passed", "")
    assert (two.result, two.note) == ("failed", "explained: it asks for the moon")
    assert not two.is_failure


def test_a_client_without_an_environment_is_not_run(setting: Setting, tmp_path: Path) -> None:
    vllm = next(client for client in CLIENTS if client.name == "vllm")
    (row,) = rows_of(vllm, Environments(tmp_path, None), setting)
    assert (row.result, row.is_failure) == ("not run", False)
    assert "--vllm" in row.note


def test_the_table_says_it_all_and_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "clients.json"
    rows = {"it": [Row("1.2", "one", "passed"), Row("1.2", "two", "failed", "a | b")]}
    assert read_rows(path) == {}
    publish(path, rows, {"model": "toy"})
    assert read_rows(path) == rows
    table = path.with_suffix(".md").read_text()
    assert "| it | 1.2 | one | passed |  |" in table
    assert "a \\| b" in table
    assert json.loads(path.read_text())["settings"] == {"model": "toy"}


class Refused(Environments):
    """Nothing can be installed."""

    def folder(self, name: str, requirements: Sequence[str], *, is_of_npm: bool = False) -> Path:
        raise Unavailable(f"{requirements[0]} is not to be had")


def test_an_agent_that_cannot_be_installed_is_not_run(tmp_path: Path) -> None:
    row = row_of_agent(AGENTS[0], Refused(tmp_path, None), tmp_path)
    assert (row.result, row.is_failure) == ("not run", False)
    assert AGENTS[0].package in row.note


def test_an_agent_passes_that_edits_and_runs_and_is_refused_nothing(tmp_path: Path) -> None:
    """Here a script stands for it: it asks once more than it has to."""
    script = tmp_path / "agent.py"
    script.write_text(AGENT, "utf-8")
    agent = replace(
        AGENTS[-1], words=lambda place: [sys.executable, str(script), place.url], package="it==1.5"
    )
    row = row_of_agent(agent, Installed(tmp_path, None), tmp_path / "passing")
    assert (row.version, row.result, row.note) == ("1.5", "passed", "")
    script.write_text(AGENT.replace("1 == 1", "1 == 2"), "utf-8")
    row = row_of_agent(agent, Installed(tmp_path, None), tmp_path / "failing")
    assert row.is_failure
    assert "the command did not run" in row.note
    assert "max_tokens" in row.note


def test_every_client_has_a_version_of_its_own_choice_and_a_script_that_exists() -> None:
    for client in CLIENTS:
        assert client.script is None or client.script.is_file()
        assert all("==" in one for one in client.requirements[:1])
        checks = [] if isinstance(client.checks, str) else [one.check for one in client.checks]
        assert client.script or set(client.explained) <= set(checks)
    assert all(re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+", agent.version) for agent in AGENTS)
