"""What the control loop has learned outlives the process, and never harms the next one."""

import asyncio
import importlib.metadata
import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.schema import Config, DrafterConfig
from cluster.coordinator.coordinator import Coordinator
from cluster.rpc.link import end_tasks
from cluster.rpc.messages import WorkerDescription
from deployments.learned import keep, learned_file, write, write_forever

TARGET = WorkerDescription("t", "target", "toy", model_hash="abc", devices=("cpu",))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTHOUSE_MODELS", str(tmp_path))
    return learned_file(Config(), TARGET, "target")


def test_another_model_drafter_or_version_begins_anew(path: Path, monkeypatch: pytest.MonkeyPatch):
    others = [
        learned_file(Config(), replace(TARGET, model_hash="abd"), "target"),
        learned_file(Config(drafters={"x": DrafterConfig("suffix")}), TARGET, "target"),
        learned_file(Config(), TARGET, "coordinator"),
    ]
    assert learned_file(Config(), replace(TARGET, worker_id="u"), "target") == path
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2")
    assert len({path, *others, learned_file(Config(), TARGET, "target")}) == 5


async def test_what_was_learned_is_there_at_the_next_start(path: Path):
    coordinator = Coordinator(Config())
    keeping = asyncio.create_task(write_forever(path, coordinator.export_learned))
    await asyncio.sleep(0)  # it begins
    await end_tasks(keeping)
    (file,) = path.parent.iterdir()
    assert file == path
    found = json.loads(file.read_bytes())
    assert found == await coordinator.export_learned()
    Coordinator(Config()).restore_learned(found)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "null", "{}", '{"scores": 3}', '{"scores": [[1]]}', None]
)
async def test_a_damaged_record_or_one_of_another_form_is_left_aside(
    path: Path, text: str | None, caplog: pytest.LogCaptureFixture
):
    if text is not None:
        file = learned_file(Config(), TARGET, "target")
        file.parent.mkdir()
        file.write_text(text)
    for kept in keep(Config(), TARGET, "target", Coordinator(Config())):
        kept.close()
    assert ("left aside" in caplog.text) == (text is not None)


def test_a_disk_that_cannot_be_written_costs_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
):
    path.parent.write_text("a file where the folder should be")
    write(path, {"version": 1})
    assert "cannot be kept" in caplog.text
