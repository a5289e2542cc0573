"""Options as vLLM's users type them become settings of ours, or errors that name the remedy."""

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config.schema import Config
from deployments.access import check_access
from deployments.asked import asked, with_api_keys
from deployments.cli import parser_for
from tests.conftest import Run


def config(*arguments: str) -> Config:
    return asked(parsed(*arguments)).config


def parsed(*arguments: str) -> argparse.Namespace:
    command = ["serve", *arguments]
    return parser_for(command).parse_args(command)


OPTIONS = yaml.safe_load(Path(__file__).with_name("vllm_options.yaml").read_text("utf-8"))


def value_at(path: str, found: Any) -> Any:
    for part in path.split("."):
        found = found[part] if isinstance(found, Mapping) else getattr(found, part)
    return list(found) if isinstance(found, tuple) else found


@pytest.mark.parametrize("case", OPTIONS, ids=lambda case: case["words"][:40])
def test_options_become_settings(case: dict[str, Any]):
    found = config("demo-target", *shlex.split(case["words"]))
    settings = case["settings"]
    assert {path: value_at(path, found) for path in settings} == settings


def test_they_hold_for_a_file_too_and_set_is_the_last_word():
    found = config("configs/tiny.yaml", "--port", "8123", "--set", "http.port=8124")
    assert found.http.port == 8124
    assert [*found.drafters] == ["lm", "code", "prose", "suffix", "ngram"]


def test_an_api_key_is_kept_as_its_hash_alone(tmp_path: Path):
    arguments = parsed("demo-target", "--api-key", "secret-1", "secret-2")
    file = with_api_keys(asked(arguments), arguments, tmp_path)
    check_access(file.config)
    written = Path(file.config.access.keys_file).read_text()
    assert "secret" not in written
    assert [*yaml.safe_load(written)["keys"]] == ["key1", "key2"]


def test_an_api_key_is_for_a_server_whose_file_names_none(tmp_path: Path, run: Run):
    for more in (("--set", f"access.keys_file={tmp_path}/keys.yaml"), ("--address", "auto")):
        said = run("serve", "demo-target", "--api-key", "k", *more, status=2)
        assert "`drafthouse key NAME` makes an entry" in said


def test_a_model_is_checked_as_a_file_is(run: Run):
    said = run("check", "demo-target", "--draft", "demo-draft", "--draft", "suffix")
    assert "the tokenizers of target and 1 draft models are the same" in said
    assert "drafter lm: inside the target" in said
