"""What the control loop has learned outlives the process, and never harms the next one."""

import asyncio
import importlib.metadata
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.schema import Config, DrafterConfig
from cluster.coordinator.coordinator import Coordinator
from cluster.messages import WorkerDescription
from deployments import learned

TARGET = WorkerDescription("t", "target", "toy", model_hash="abc", devices=("cpu",))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTHOUSE_MODELS", str(tmp_path))
    return learned.learned_file(Config(), TARGET, "1", "target")


def test_another_model_drafter_or_version_begins_anew(path: Path) -> None:
    others = [
        learned.learned_file(Config(), replace(TARGET, model_hash="abd"), "1", "target"),
        learned.learned_file(
            Config(drafters={"x": DrafterConfig("suffix")}), TARGET, "1", "target"
        ),
        learned.learned_file(Config(), TARGET, "2", "target"),
        learned.learned_file(Config(), TARGET, "1", "coordinator"),
    ]
    assert len({path, *others}) == 5
    assert learned.learned_file(Config(), replace(TARGET, worker_id="u"), "1", "target") == path


async def test_what_was_learned_is_there_at_the_next_start(path: Path) -> None:
    coordinator = Coordinator(Config())
    keeping = asyncio.create_task(learned.write_forever(path, coordinator.export_learned))
    await asyncio.sleep(0)  # it begins
    await learned.end(keeping)
    state = await coordinator.export_learned()
    found = learned.read(path)
    assert found == state
    Coordinator(Config()).restore_learned(found)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_a_damaged_file_is_as_none(path: Path, text: str) -> None:
    assert learned.read(path) is None
    learned.write(path, {"version": 1})
    path.write_text(text)
    assert learned.read(path) is None


@pytest.mark.parametrize("state", [{}, {"scores": 3}, {"scores": [[1]]}])
async def test_a_record_of_another_form_is_left_aside(
    path: Path, state: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    version, coordinator = importlib.metadata.version("drafthouse"), Coordinator(Config())
    learned.write(learned.learned_file(Config(), TARGET, version, "target"), state)
    await learned.end(learned.keep(Config(), TARGET, "target", coordinator))
    assert "left aside" in caplog.text


def test_a_disk_that_cannot_be_written_costs_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.write_text("a file where the folder should be")
    learned.write(path, {"version": 1})
    assert "cannot be kept" in caplog.text
