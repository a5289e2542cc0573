"""What `drafthouse` says of keys: it makes them, and checks the file that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config.access import digest_of
from deployments.cli import main

Capture = pytest.CaptureFixture[str]


def checked(folder: Path, model: Path, **arguments: Any) -> int:
    engine = {"model": str(model), "device": "cpu", "threads": 1}
    application = {
        "import_path": "deployments.app:build",
        "args": {"target": {"engine": engine}, **arguments},
    }
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump({"applications": [application]}))
    return main(["check", str(file)])


def test_a_new_key_is_shown_once_with_its_entry(capsys: Capture) -> None:
    keys = []
    for _ in range(2):
        assert main(["key", "alice"]) == 0
        said = capsys.readouterr().out
        (key,) = (word for word in said.split() if word.startswith("dh-"))
        assert yaml.safe_load(said) == {"keys": {"alice": {"sha256": digest_of(key)}}}
        keys.append(key)
    assert keys[0] != keys[1]
    assert min(map(len, keys)) > 40


def test_a_name_that_no_key_can_have_is_refused(capsys: Capture) -> None:
    assert main(["key", "a b"]) == 2
    assert "NAME: a key's name may hold letters" in capsys.readouterr().err


def test_a_wrong_file_of_keys_is_refused_with_the_entry(
    tmp_path: Path, llama_folder: Path, capsys: Capture
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: {alice: {sha256: dh-0123}}")
    assert checked(tmp_path, llama_folder, access={"keys_file": str(path)}) == 2
    said = capsys.readouterr().err
    assert f"access.keys_file: {path}: keys.alice.sha256: it is no SHA-256 digest" in said
    assert "`drafthouse key NAME`" in said
    assert "dh-0123" not in said
    path.unlink()
    assert checked(tmp_path, llama_folder, access={"keys_file": str(path)}) == 2
    assert f"access.keys_file: {path}: cannot be read" in capsys.readouterr().err


def test_the_plan_says_who_may_ask(tmp_path: Path, llama_folder: Path, capsys: Capture) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: {{alice: {{sha256: {digest_of('x')}}}}}")
    assert checked(tmp_path, llama_folder, access={"keys_file": str(path)}) == 0
    assert f"clients need a key of {path} (1 keys)" in capsys.readouterr().out
    assert checked(tmp_path, llama_folder) == 0
    assert "whoever reaches it" not in capsys.readouterr().out
    assert checked(tmp_path, llama_folder, http={"host": "0.0.0.0"}) == 0
    said = capsys.readouterr().out
    (line,) = (line for line in said.splitlines() if "whoever reaches it" in line)
    assert "http.host 0.0.0.0: whoever reaches it may ask" in line
    assert "access.keys_file" in line


def test_ports_of_operators_and_of_clients_differ(
    tmp_path: Path, llama_folder: Path, capsys: Capture
) -> None:
    assert checked(tmp_path, llama_folder, access={"admin": {"port": 8000}}) == 2
    assert "access.admin.port: 8000 is already http.port" in capsys.readouterr().err
