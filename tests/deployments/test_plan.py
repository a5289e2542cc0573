"""`drafthouse plan`: memory, speed-up and warnings, by files alone and by a measurement."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import REPOSITORY, Run, serve_file
from tests.support.choices import by_day

pytestmark = pytest.mark.usefixtures("no_models")
PAGES, PAGE_SIZE = 64, 16


@pytest.fixture
def configuration(llama_folder: Path, draft_folder: Path, tmp_path: Path) -> Path:
    small = {"device": "cpu", "threads": 1, "num_pages": PAGES}
    arguments = {
        "target": {"engine": {**small, "model": str(llama_folder)}},
        "drafters": {
            "lm": {"kind": "lm", "options": {"engine": {**small, "model": str(draft_folder)}}},
            "suffix": {"kind": "suffix"},
        },
        "tasks": {"default": ["lm", "suffix"], "text": ["suffix"]},
    }
    return serve_file(tmp_path, arguments)


def planned(run: Run, *arguments: object) -> dict[str, Any]:
    return json.loads(run("plan", *arguments, "--json"))


def part(plan: dict[str, Any], owner: str, what: str) -> int:
    (found,) = (
        each["num_bytes"]
        for each in plan["memory"]["parts"]
        if (each["owner"], each["what"]) == (owner, what)
    )
    return int(found)


def test_by_files_alone(configuration: Path, llama_folder: Path, run: Run):
    plan = planned(run, configuration)
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
        "5 to 20 times smaller",
        "at least 50 M parameters",
        "at least 5 times faster",
    }
    assert all(each["source"] and each["drafter"] == "lm" for each in plan["warnings"])


def test_a_measurement_has_its_own_column_and_a_row_for_each_load(configuration: Path, run: Run):
    plan = planned(run, configuration, "--measure", "--acceptance", "0.6")
    assert [load["requests"] for load in plan["loads"]] == [1, 4, 16, 64]
    assert plan["measured"]["total"] > plan["measured"]["kv_cache"] >= 0
    assert plan["measured"]["refused"] == {}
    assert plan["measured"]["step_s"] > 0
    assert plan["measured"]["draft_token_s"] > 0
    assert plan["speedup"]["measured"] > 0
    assert plan["speedup"]["acceptance"] == 0.6


def test_as_text_both_acceptances_and_every_formula_stand_beside_each_other(
    configuration: Path, run: Run
):
    text = run("plan", configuration)
    assert "accepted / drafted, which servers report, is not a: here it would read 0.59" in text
    for words in (
        "(k + 1 - a) / (k (1 - a) + 1)",
        "Leviathan's (1 - a^(k+1)) / ((1 - a) (c k + 1))",
        "the measured curve",
        "see --measure",
        "one target process in all:",
        "warning: drafter lm: at least 50 M parameters; it is",
    ):
        assert words in text


def test_a_model_that_is_known_by_its_configuration_alone_is_sized(
    configuration: Path, llama_folder: Path, tmp_path: Path, run: Run
):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(llama_folder / "config.json", bare)
    here = planned(run, configuration)
    there = planned(run, configuration, "--set", f"target.engine.model={bare}")
    for what in ("weights", "kv_cache"):
        assert part(there, "target.engine", what) == part(here, "target.engine", what)


UNKNOWN = "nobody/knows-it"
# Why it is not split, how many GPUs hold it, and its share of parameters that a token needs.
UNDIVIDED = [
    ("openai/gpt-oss-120b", "no tensor-par", 1, 0.0489),
    ("deepseek-ai/DeepSeek-V3", "the latents", 8, 0.0559),
]
DOCUMENT = REPOSITORY / "docs/plan.md"


@pytest.mark.parametrize("words", [(UNKNOWN,), ("models/demo-target", "--draft", UNKNOWN)])
def test_an_unknown_size_gives_no_figure(words: tuple[str, ...], run: Run):
    found = planned(run, *words)
    assert found["speedup"]["cost"] is None
    assert found["speedup"]["leviathan"] is None
    assert found["loads"] == []
    assert (found["total_bytes"] is None) == (words[0] == UNKNOWN)
    text = run("plan", *words)
    assert "c not known" in text
    assert "nothing is known here of its size" in text


def test_a_model_that_is_not_here_is_planned_for_a_card_that_is_not_here(run: Run):
    words = ("Qwen/Qwen3-8B", "--draft", "Qwen/Qwen3-0.6B", "--gpu", "H100")
    found = planned(run, *words)
    assert found["gpus"] == {
        "kind": "h100",
        "count": 1,
        "memory": 80_000_000_000,
        "bandwidth": 3.35e12,
        "source": "NVIDIA's data sheet",
    }
    assert part(found, "target.engine", "weights") == 2 * 8_190_735_360
    assert found["speedup"]["cost"] == pytest.approx(596 / 8191, rel=0.01)
    per_token = 2 * 36 * 8 * 128 * 2
    cache = part(found, "target.engine", "kv_cache")
    assert cache == found["memory"]["num_tokens"] * per_token
    assert 0.5 * 80e9 < cache + 2 * 8_190_735_360 < 0.9 * 80e9


def test_a_large_model_is_divided_between_the_cards_that_are_named(run: Run):
    model = "meta-llama/Llama-3.3-70B-Instruct"
    found = planned(run, model, "--gpu", "h100", "--num-gpus", "8")
    splits = {each["ranks"]: each for each in found["splits"]}
    assert [*splits] == [1, 2, 4, 8]
    assert splits[1]["num_tokens"] == 0
    assert splits[8]["num_tokens"] > splits[4]["num_tokens"] > 32768
    assert splits[8]["step_s"] == pytest.approx(2 * 70.55e9 / 8 / 3.35e12, rel=0.01)
    assert found["memory"]["too_large"] == ["target.engine"]
    divided = planned(run, model, "-tp", "8", "--gpu", "h100")
    assert divided["gpus"]["count"] == 8
    assert divided["memory"]["too_large"] == []
    assert divided["memory"]["num_tokens"] == splits[8]["num_tokens"]
    assert divided["total_bytes"] < 80e9


@pytest.mark.parametrize(("model", "reason", "least", "active"), by_day(UNDIVIDED[:1], UNDIVIDED))
def test_what_the_engine_does_not_take_as_ranks_is_said_and_its_layers_spread(
    model: str, reason: str, least: int, active: float, run: Run
):
    words = model, "--gpu", "h200", "--num-gpus", "8"
    found = planned(run, *words)
    (target,) = found["memory"]["models"]
    assert target["read"] == pytest.approx(active * target["weights"], rel=0.02)
    whole, *others = found["splits"]
    refused, spread = others[:3], {1: whole} | {each["gpus"]: each for each in others[3:]}
    assert [each["ranks"] for each in refused] == [2, 4, 8]
    assert all(reason in each["refused"] for each in refused)
    assert next(count for count, each in spread.items() if each["num_tokens"]) == least
    assert "target.engine.device_map=auto" in (text := run("plan", *words))
    assert "(-tp)\n" not in text, "what is refused is advised"
    for setting in ("engine.device_map=auto", "placement.num_gpus=8"):
        words += ("--set", f"target.{setting}")
    most = 64 * 131_072  # what so many texts of one of the models can use
    assert planned(run, *words)["memory"]["num_tokens"] == min(spread[8]["num_tokens"], most)
    (engine,) = json.loads(run("check", *words, "--json"))["engines"]
    assert engine["kv_tokens_by_gpu_gb"]["141"] == spread[8]["num_tokens"]
    assert engine["rank_weights_bytes"] == spread[8]["gpu_weights"]


def test_a_model_that_is_larger_than_this_machine_is_told(run: Run):
    words = ("--set", "target.engine.device=cpu")
    assert "are free on this machine" in run("plan", "meta-llama/Llama-3.1-405B-Instruct", *words)
    assert "DOES NOT FIT" not in run("plan", "models/demo-target", *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("named", by_day(["two-node"], ["two-node", "llama-70b-8xh100"]))
def test_a_configuration_for_gpus_is_planned_where_there_are_none(named: str, run: Run):
    found = planned(run, f"configs/{named}.yaml")
    assert found["gpus"]["kind"] == ""
    assert {each["what"] for each in found["memory"]["parts"]} == {"weights", "working"}
    assert found["memory"]["num_tokens"] == 0
    assert "--gpu names one" in run("plan", f"configs/{named}.yaml")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_check_names_options_that_it_has_where_gpus_are_missing(llama_folder: Path, run: Run):
    words = ["check", str(llama_folder), "-tp", "2"]
    assert "`check` and `plan` have --gpu and --num-gpus" in run(*words, status=2)
    run(*words, "--gpu", "l4")


def test_every_command_of_the_page_works_as_printed(run: Run):
    lines = re.findall(r"^\.venv/bin/drafthouse (plan .*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert len(lines) > 4
    for line in by_day(lines[:2], lines):
        words = shlex.split(line)
        if "--measure" not in words:  # which needs the models
            said = run(*words)
            assert "total_bytes" in said or "in all" in said
