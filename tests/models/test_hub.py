"""Nothing that could run comes from the hub."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.models.names import HubSource
from tests.support.models.fake_hub import COMMIT, FakeHub, fake_hub, named

RUNS = ("modeling_tiny.py", "tokenization_tiny.py", "training.pt", "more.ckpt", "old.pth")


@pytest.fixture
def hub(llama_folder: Path, tmp_path: Path) -> Iterator[FakeHub]:
    folder = tmp_path / "published"
    shutil.copytree(llama_folder, folder)
    for name in RUNS:
        (folder / name).write_text("raise SystemExit('it ran')")
    with fake_hub(folder) as found:
        yield found


def ran(hub: FakeHub, cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    where = {"HF_HUB_CACHE": str(cache / "hub"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    return named(*words, **where)


def test_no_file_that_could_run_is_fetched_and_an_unpinned_model_is_told(hub: FakeHub, cache: Path):
    found = ran(hub, cache, "serve:org/tiny@main", f"serve:org/tiny@{COMMIT}")
    assert "model.safetensors" in hub.fetched, found.stderr
    assert {"config.json", "tokenizer.json"} <= hub.fetched
    assert not hub.fetched & set(RUNS)
    assert "target.engine.model: org/tiny@main names no commit" in found.stderr
    assert found.stderr.count("names no commit") == 1
    assert f"to pin this one: org/tiny@{COMMIT}" in found.stderr


def test_a_model_of_pickled_weights_is_refused_by_name_with_the_remedy(hub: FakeHub, cache: Path):
    (hub.folder / "model.safetensors").rename(hub.folder / "pytorch_model.bin")
    said = ran(hub, cache, "serve:org/tiny", "head:org/tiny").stdout
    assert said.count("org/tiny has its weights as a pickle alone") == 2, said
    assert said.count("hf download org/tiny --local-dir FOLDER") == 2
    assert not any(name.endswith((".bin", ".pt")) for name in hub.fetched)


def test_a_head_is_fetched_whatever_its_safetensors_are_called(hub: FakeHub, cache: Path):
    (hub.folder / "model.safetensors").rename(hub.folder / "medusa_lm_head.safetensors")
    found = ran(hub, cache, "head:org/tiny")
    assert found.stdout.strip().endswith(COMMIT), found.stderr
    assert "names no commit" in found.stderr
    assert hub.fetched == {"config.json", "medusa_lm_head.safetensors"}


def test_a_commit_alone_is_pinned():
    assert HubSource("org/tiny", COMMIT).is_pinned
    for revision in (None, "main", "v1.0", COMMIT[:12]):
        assert not HubSource("org/tiny", revision).is_pinned
