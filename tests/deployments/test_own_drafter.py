"""A user's own drafters, in files beside the configuration, under the true command."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deployments.conftest import wait_until
from tests.deployments.test_cli import config_file
from tests.draft.test_plugin import block
from tests.support.choices import by_night
from tests.support.deployments.api import Api
from tests.support.deployments.command import Command, ports

__all__ = ["config_file"]

BROKEN = """
class BrokenDrafter:
    def __init__(self, context, options):
        raise RuntimeError("no such file: phrases.txt")

    def observe(self, commits): ...
    def propose(self, tasks): ...
    def release(self, request_ids): ...
"""

# It has only what the page asks for, and fails whenever it is asked.
RAISING = """
from cluster.draft.plugin import TextDrafter

class RaisingDrafter(TextDrafter):
    def draft(self, request, max_nodes):
        raise ValueError("what the prompt says")
"""


@pytest.fixture
def serving(config_file: Path) -> Iterator[Command]:
    """The page's drafter, one that cannot be created and one that raises, in the configuration's
    folder."""
    source = block("python")
    name = source.splitlines()[0].removeprefix("# ")
    (config_file.parent / name).write_text(source)
    (config_file.parent / "broken.py").write_text(BROKEN)
    (config_file.parent / "raising.py").write_text(RAISING)
    document = yaml.safe_load(config_file.read_text())
    drafters = document["applications"][0]["args"]["drafters"]
    drafters |= yaml.safe_load(block("yaml"))["drafters"]
    drafters["broken"] = {"kind": "broken:BrokenDrafter"}
    drafters["raising"] = {"kind": "raising:RaisingDrafter"}
    config_file.write_text(yaml.safe_dump(document))
    command = Command(config_file.parent, str(config_file))
    yield command
    command.end()


@by_night
def test_good_ones_serve_and_of_others_it_is_told_what_is_wrong_and_where(
    serving: Command, config_file: Path
):
    serving.wait_for("Drafthouse is ready:")
    url = f"http://127.0.0.1:{ports(config_file)[0]}"
    state = httpx.get(f"{url}/health").json()
    assert state["drafters"] == {"broken": 0, "echo": 1, "lookup": 1, "raising": 1}
    assert set(state["refused"]) == {"broken"}
    reason = state["refused"]["broken"]
    assert re.search(r"RuntimeError: no such file: phrases\.txt \(.*broken\.py, line 4\)", reason)
    said = serving.stderr.read_text()
    assert f"drafthouse: drafter broken is refused: {reason}\n" in said
    assert "still loading" not in said
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    assert (state["faults"], state["left_alone"]) == ({}, [])
    Api(url).complete(prompt="abc abc abc", max_tokens=24)
    serving.wait_for("drafter failed drafter=raising")
    said = serving.stderr.read_text()
    assert re.search(r"raising .*: ValueError \(.*/raising\.py, line 6\)\n", said)
    assert "what the prompt says" not in said
    wait_until(
        lambda: httpx.get(f"{url}/health").json()["faults"].get("raising", {}).get("refused", 0) > 0
    )
    # Killed, its first process leaves nothing behind.
    serving.check_end("the first, to die at once")
    assert serving.said_by_others() == []
