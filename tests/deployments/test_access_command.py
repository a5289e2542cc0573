"""What `drafthouse` says of keys: it makes them, and checks the file that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config.access import digest_of
from tests.conftest import Run, serve_file


@pytest.fixture
def checked(tmp_path: Path, llama_folder: Path, run: Run) -> Run:
    """Check a file with these sections beside the target's."""

    def checked(status: int = 0, **arguments: Any) -> str:
        engine = {"model": str(llama_folder), "device": "cpu", "threads": 1}
        file = serve_file(tmp_path, {"target": {"engine": engine}, **arguments})
        return run("check", file, status=status)

    return checked


def test_a_new_key_is_shown_once_with_its_entry(run: Run) -> None:
    keys = []
    for _ in range(2):
        said = run("key", "alice")
        (key,) = (word for word in said.split() if word.startswith("dh-"))
        assert yaml.safe_load(said) == {"keys": {"alice": {"sha256": digest_of(key)}}}
        keys.append(key)
    assert keys[0] != keys[1]
    assert min(map(len, keys)) > 40


def test_a_wrong_file_of_keys_is_refused_with_the_entry(tmp_path: Path, checked: Run) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: {alice: {sha256: dh-0123}}")
    said = checked(2, access={"keys_file": str(path)})
    assert f"access.keys_file: {path}: keys.alice.sha256: it is no SHA-256 digest" in said
    assert "`drafthouse key NAME`" in said
    assert "dh-0123" not in said
    path.unlink()
    said = checked(2, access={"keys_file": str(path)})
    assert f"access.keys_file: {path}: cannot be read" in said


def test_the_plan_says_who_may_ask(tmp_path: Path, checked: Run) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: {{alice: {{sha256: {digest_of('x')}}}}}")
    said = checked(access={"keys_file": str(path)})
    assert f"clients need a key of {path} (1 keys)" in said
    assert "whoever reaches it" not in checked()
    said = checked(http={"host": "0.0.0.0"})
    (line,) = (line for line in said.splitlines() if "whoever reaches it" in line)
    assert "http.host 0.0.0.0: whoever reaches it may ask" in line
    assert "access.keys_file" in line


def test_ports_of_operators_and_of_clients_differ(checked: Run) -> None:
    said = checked(2, access={"admin": {"port": 8000}})
    assert "access.admin.port: 8000 is already http.port" in said
