"""`drafthouse plan`: memory, speed-up and warnings, by files alone and by a measurement."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from deployments.cli import main

Capture = pytest.CaptureFixture[str]
PAGES, PAGE_SIZE = 64, 16


@pytest.fixture
def configuration(llama_folder: Path, draft_folder: Path, tmp_path: Path) -> Path:
    small: dict[str, Any] = {"device": "cpu", "threads": 1, "num_pages": PAGES}
    arguments = {
        "target": {"engine": {**small, "model": str(llama_folder)}},
        "drafters": {
            "lm": {"kind": "lm", "options": {"engine": {**small, "model": str(draft_folder)}}},
            "suffix": {"kind": "suffix"},
        },
        "tasks": {"default": ["lm", "suffix"], "text": ["suffix"]},
    }
    application = {"import_path": "deployments.app:build", "args": arguments}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


def planned(capture: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capture.readouterr().out)
    return found


def part(plan: dict[str, Any], owner: str, what: str) -> int:
    (found,) = (
        each["num_bytes"] for each in plan["memory"]["parts"]
        if (each["owner"], each["what"]) == (owner, what)
    )  # fmt: skip
    return int(found)


def test_by_files_alone(configuration: Path, llama_folder: Path, capsys: Capture) -> None:
    plan = planned(capsys, str(configuration))
    config = json.loads((llama_folder / "config.json").read_text())
    per_token = 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    kv_bytes = PAGES * PAGE_SIZE * per_token * config["num_hidden_layers"]
    assert part(plan, "target.engine", "kv_cache") == kv_bytes
    assert plan["memory"]["num_tokens"] == PAGES * PAGE_SIZE
    longest = max(map(int, plan["memory"]["requests"]))
    assert plan["memory"]["requests"][str(longest)] == min(PAGES * PAGE_SIZE // longest, 64)
    stored = sum(
        each.nbytes
        for file in llama_folder.glob("*.safetensors")
        for each in load_file(file).values()
    )
    # An output layer has its own copy where it shares the embedding's weight.
    assert stored <= part(plan, "target.engine", "weights") <= 2 * stored
    assert plan["total_bytes"] == sum(each["num_bytes"] for each in plan["memory"]["parts"])
    assert plan["measured"] is None
    assert plan["speedup"]["measured"] is None
    assert plan["speedup"]["accepted_share"] == pytest.approx(0.59, abs=0.001)
    assert plan["speedup"]["cost"] == pytest.approx(1.0, rel=0.01), "as large as its target"
    assert {each["rule"].split(" than")[0] for each in plan["warnings"]} == {
        "5 to 20 times smaller", "at least 50 M parameters", "at least 5 times faster",
    }  # fmt: skip
    assert all(each["source"] and each["drafter"] == "lm" for each in plan["warnings"])


def test_a_measurement_has_its_own_column_and_a_row_for_each_load(
    configuration: Path, capsys: Capture
) -> None:
    plan = planned(capsys, str(configuration), "--measure", "--acceptance", "0.6")
    assert [load["requests"] for load in plan["loads"]] == [1, 4, 16, 64]
    assert plan["measured"]["total"] > plan["measured"]["kv_cache"] >= 0
    assert plan["measured"]["refused"] == {}
    assert plan["measured"]["step_s"] > 0
    assert plan["measured"]["draft_token_s"] > 0
    assert plan["speedup"]["measured"] > 0
    assert plan["speedup"]["acceptance"] == 0.6


def test_as_text_both_acceptances_and_every_formula_stand_beside_each_other(
    configuration: Path, capsys: Capture
) -> None:
    assert main(["plan", str(configuration)]) == 0
    text = capsys.readouterr().out
    assert "accepted / drafted, which servers report, is not a: here it would read 0.59" in text
    for words in (
        "(k + 1 - a) / (k (1 - a) + 1)", "Leviathan's (1 - a^(k+1)) / ((1 - a) (c k + 1))",
        "the measured curve", "see --measure", "one target process in all:",
        "warning: drafter lm: at least 50 M parameters; it is",
    ):  # fmt: skip
        assert words in text


def test_a_model_that_is_known_by_its_configuration_alone_is_sized(
    configuration: Path, llama_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(llama_folder / "config.json", bare)
    here = planned(capsys, str(configuration))
    there = planned(capsys, str(configuration), "--set", f"target.engine.model={bare}")
    for what in ("weights", "kv_cache"):
        assert part(there, "target.engine", what) == part(here, "target.engine", what)


def test_a_class_that_there_is_not_is_refused(configuration: Path, capsys: Capture) -> None:
    assert main(["plan", str(configuration), "--task", "txt"]) == 2
    assert "--task: no class 'txt' (default, text)" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [("--acceptance", "1.5"), ("--draft-tokens", "0")])
def test_numbers_that_make_no_sense_are_refused(
    configuration: Path, wrong: tuple[str, str], capsys: Capture
) -> None:
    assert main(["plan", str(configuration), *wrong]) == 2
    assert "--acceptance is a number from 0 to 1" in capsys.readouterr().err
