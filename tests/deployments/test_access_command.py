"""What `drafthouse` says of keys: it makes them, and checks the file that has them."""

from pathlib import Path

import yaml

from cluster.config.doors import digest_of
from tests.conftest import Run


def test_a_new_key_is_shown_once_with_its_entry(run: Run):
    keys = []
    for _ in range(2):
        said = run("key", "alice")
        (key,) = (word for word in said.split() if word.startswith("dh-"))
        assert yaml.safe_load(said) == {"keys": {"alice": {"sha256": digest_of(key)}}}
        keys.append(key)
    assert keys[0] != keys[1]
    assert min(map(len, keys)) > 40


def test_a_wrong_file_of_keys_is_refused_with_the_entry(tmp_path: Path, check: Run):
    path = tmp_path / "keys.yaml"
    path.write_text("keys: {alice: {sha256: dh-0123}}")
    said = check(2, access={"keys_file": str(path)})
    assert f"access.keys_file: {path}: keys.alice.sha256: it is no SHA-256 digest" in said
    assert "`drafthouse key NAME`" in said
    assert "dh-0123" not in said
    path.unlink()
    said = check(2, access={"keys_file": str(path)})
    assert f"access.keys_file: {path}: cannot be read" in said


def test_the_plan_says_who_may_ask(tmp_path: Path, check: Run):
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: {{alice: {{sha256: {digest_of('x')}}}}}")
    said = check(access={"keys_file": str(path)})
    assert f"clients need a key of {path} (1 keys)" in said
    assert "whoever reaches it" not in check()
    said = check(http={"host": "0.0.0.0"})
    (line,) = (line for line in said.splitlines() if "whoever reaches it" in line)
    assert "http.host 0.0.0.0: whoever reaches it may ask" in line
    assert "access.keys_file" in line
