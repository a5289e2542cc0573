"""Clients that others wrote are run so that none can spoil the run: limits, reasons, the table."""

import re
import sys
import time
from pathlib import Path

import pytest

from benchmarks.clients.environments import Environments
from benchmarks.clients.plan import CLIENTS, Client, Command, Setting
from benchmarks.clients.running import rows_of
from tests.support.agents.plan import AGENTS
from tests.support.clock import wait_until
from tests.support.deployments.command import running

SCRIPT = """
import json, sys
assert sys.argv[1:] == ["http://host", "toy"]
print("chatter")
print(json.dumps({"check": "one", "error": "", "seconds": 1.5}))
print(json.dumps({"check": "two", "error": "bad\\n  news", "seconds": 0.1}))
"""


class Here(Environments):
    """This interpreter's own environment, for every client."""

    def bin(self, client: Client) -> Path:
        return Path(sys.executable).parent


HERE = Here(Path("unused"), None)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting("http://host", "toy", tmp_path, tmp_path / "work")


def scripted(text: str, tmp_path: Path, **fields: object) -> Client:
    script = tmp_path / "script.py"
    script.write_text(text)
    return Client("it", "pytest", ("pytest",), str(script), **fields)


def commanded(code: str, *shows: str, timeout_s: float = 60.0) -> Client:
    command = Command("it", lambda _: ["python", "-c", code], shows)
    return Client("it", "pytest", ("pytest",), (command,), timeout_s=timeout_s)


def test_each_check_of_a_script_is_a_row(tmp_path: Path, setting: Setting):
    one, two = rows_of(scripted(SCRIPT, tmp_path), HERE, setting)
    assert (one.check, one.result, one.note, one.seconds) == ("one", "passed", "", 1.5)
    assert (two.check, two.result, two.note) == ("two", "failed", "bad news")
    assert one.version == pytest.__version__
    assert two.is_failure


def test_a_client_that_hangs_is_ended_with_what_it_started(tmp_path: Path, setting: Setting):
    child = tmp_path / "child"
    code = (
        "import subprocess, pathlib, time; one = subprocess.Popen(['sleep', '600']);"
        f" pathlib.Path({str(child)!r}).write_text(str(one.pid)); time.sleep(600)"
    )
    started_at = time.monotonic()
    (row,) = rows_of(commanded(code, timeout_s=3.0), HERE, setting)
    assert time.monotonic() - started_at < 60.0
    assert row.result == "failed"
    assert row.note.startswith("it took too long")
    wait_until(lambda: not running(int(child.read_text())))


def test_every_client_has_a_version_of_its_own_choice_and_a_script_that_exists():
    for client in CLIENTS:
        assert client.script is None or client.script.is_file()
        assert all("==" in one for one in client.requirements[:1])
        checks = [] if isinstance(client.checks, str) else [one.check for one in client.checks]
        assert client.script or set(client.explained) <= set(checks)
    assert all(re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+", agent.version) for agent in AGENTS)
