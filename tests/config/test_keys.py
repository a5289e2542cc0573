"""The file of keys: what it may say, and that nothing it says wrong is repeated where it may be a
key."""

from pathlib import Path

import pytest

from cluster.config.doors import AccessConfig, KeysFile, digest_of
from cluster.config.schema import Config
from cluster.errors import ConfigError
from deployments.access import read_keys

ALICE, BOB = digest_of("alice's"), digest_of("bob's")
GOOD = f"""
keys:
  alice:
    sha256: {ALICE}
    requests_per_minute: 60
    classes: [interactive]
    default_class: interactive
  bob: {{sha256: {BOB}, admin: true}}
classes:
  interactive: {{concurrent_requests: 4}}
"""


def read(folder: Path, text: str) -> KeysFile:
    path = folder / "keys.yaml"
    path.write_text(text)
    return read_keys(Config(access=AccessConfig(str(path)), tasks={"code": ()}))


def test_a_good_file_is_read_as_yaml_and_as_json(tmp_path: Path):
    found = read(tmp_path, GOOD)
    alice, bob = found.keys["alice"], found.keys["bob"]
    assert (alice.sha256, alice.requests_per_minute, alice.admin) == (ALICE, 60, False)
    assert (alice.classes, alice.default_class) == (("interactive",), "interactive")
    assert (bob.admin, bob.classes, bob.tokens_per_minute) == (True, None, None)
    assert found.classes["interactive"].concurrent_requests == 4
    assert read(tmp_path, f'{{"keys": {{"bob": {{"sha256": "{BOB}"}}}}}}').keys["bob"].sha256 == BOB


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "keys.yaml: the file is empty; see docs/access.md"),
        ("keys: {}", "keys: there is none"),
        ("keys: the-key", "keys: not a mapping; write `NAME: {sha256: DIGEST}`"),
        ("keys: [the-key]", "keys: not a mapping; write `NAME: {sha256: DIGEST}`"),
        ("keys: {alice: {}}", "keys.alice.sha256: missing; `drafthouse key alice`"),
        ("keys: {alice: the-key}", "keys.alice: not a mapping; write `sha256: DIGEST`"),
        ("keys: {alice: {sha256: the-key}}", "keys.alice.sha256: it is no SHA-256 digest"),
        ("keys: {a b: {sha256: x}}", "keys.a b: 'a b' is no name of letters"),
        (f"keys: {{alice: {{sha256: {ALICE}, limit: 3}}}}", "keys.alice.limit: unknown key"),
        (
            f"keys: {{alice: {{sha256: {ALICE}, requests_per_minute: 0}}}}",
            "keys.alice.requests_per_minute: 0 is out of range",
        ),
        (
            f"keys: {{alice: {{sha256: {ALICE}}}, bob: {{sha256: {ALICE}}}}}",
            "keys.bob.sha256: that of alice as well; give each a key of its own",
        ),
        (
            f"keys: {{alice: {{sha256: {ALICE}, classes: [fast]}}}}",
            "keys.alice.classes: 'fast' is no class that it may name",
        ),
        (
            f"keys: {{alice: {{sha256: {ALICE}, default_class: interactive}}}}",
            "keys.alice.default_class: 'interactive' is no class that it may name",
        ),
        (
            f"keys: {{alice: {{sha256: {ALICE}, default_task: prose}}}}",
            "keys.alice.default_task: 'prose' is no task",
        ),
        (f"{GOOD}  fast: {{}}", "classes.fast: 'fast' is no class"),
        ("keys: [", "line 1, column 8: not valid YAML"),
    ],
)
def test_a_wrong_file_names_the_entry_and_the_remedy(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    assert message in refused.value.message
    assert "the-key" not in refused.value.message
    assert "keys.yaml" in refused.value.message
