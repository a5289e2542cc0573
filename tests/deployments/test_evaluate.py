"""`drafthouse evaluate`: from pairs of answers to a judgement of each cell."""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from cluster.config.schema import Config, DrafterConfig
from cluster.core import SamplingParams
from cluster.spec.interval import Interval
from deployments.evaluate.command import (
    AskedPrompt,
    Cell,
    Cells,
    Pair,
    _cells,
    is_useless,
    judge,
    verdict,
)
from deployments.evaluate.prompts import EvaluatedPrompt, read_prompts
from deployments.report import rendered
from tests.conftest import Run, serve_file
from tests.support.errors import config_error

CODE, CHAT = Cell("code", "", "greedy"), Cell("default", "trial", "sampled")
CONFIG = Config(
    drafters={name: DrafterConfig(kind="suffix") for name in ("lm", "suffix", "random")},
    tasks={"code": ("lm", "suffix", "random"), "default": ("lm",)},
)


def pairs(ratio: float, share: float = 0.5, drafter: str = "lm", *, had: bool = True) -> list[Pair]:
    """Four pairs about a ratio; share: of the tokens that were the drafter's."""
    return [
        Pair(100 * ratio * noise, 100.0, 100, {drafter: int(100 * share)}, had)
        for noise in (0.99, 1.0, 1.0, 1.01)
    ]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.05, 1.3, "pays"),
        (1.049, 1.9, "cannot tell"),
        (0.9, 0.979, "slows"),
        (0.5, 0.98, "cannot tell"),
        (0.97, 1.06, "cannot tell"),
        (None, None, "cannot tell"),
    ],
)
def test_the_whole_interval_must_lie_where_it_decides(
    low: float | None, high: float | None, expected: str
):
    assert verdict(Interval(1.0, low, high, 9)) == expected


def test_a_drafter_is_useless_if_it_slows_texts_or_could_not_speed_them_up():
    assert not is_useless("lm", pairs(1.4))
    assert is_useless("lm", pairs(0.9)), "it slows"
    assert is_useless("lm", pairs(1.0, share=0.02)), "2 % of the tokens save 2 % of the steps"
    assert not is_useless("lm", pairs(1.0, share=0.2)), "dear today, but it could"
    assert not is_useless("lm", pairs(1.0, share=0.0, had=False)), "nothing was shown"
    assert not is_useless("lm", pairs(0.9, share=0.0, had=False)), "nor by what the clock says"
    assert not is_useless("lm", [])


def asked() -> Sequence[AskedPrompt]:
    return [AskedPrompt(EvaluatedPrompt("once"), SamplingParams())]


def test_useless_drafters_are_named_by_what_each_does_alone():
    measured: list[tuple[tuple[str, ...], list[Cell]]] = []
    by_names = {
        ("lm", "suffix", "random"): {CODE: pairs(1.5), CHAT: pairs(0.9)},
        ("lm",): {CODE: pairs(1.2)},
        ("suffix",): {CODE: pairs(1.1, 0.2, "suffix")},
        ("random",): {CODE: pairs(0.99, 0.0, "random")},
    }

    def measure(names: Sequence[str], cells: Cells) -> Mapping[Cell, Sequence[Pair]]:
        measured.append((tuple(names), list(cells)))
        return by_names[tuple(names)]

    code, chat = judge({CODE: asked(), CHAT: asked()}, CONFIG, measure)
    assert (code.drafts, code.useless) == ("pays", ("random",))
    assert code.found.mean == pytest.approx(1.5, rel=0.01)
    assert set(code.alone) == {"lm", "suffix", "random"}
    # Its only drafter needs no trial of its own.
    assert (chat.drafts, chat.alone) == ("slows", {})
    assert measured[1:] == [((name,), [CODE]) for name in ("lm", "suffix", "random")]
    shown = rendered("evaluate", {"judgements": [code, chat]})
    assert "1.50 (1.48 to 1.52)    pays" in shown
    assert "random alone, useless" in shown


def test_prompts_may_be_ours_spec_benchs_or_openai_bodies(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    message = {"role": "user", "content": "Hello"}
    lines = [
        {"prompt": "def\u2028f", "task": "code", "segment": "trial"},
        {"question_id": 81, "category": "code", "turns": ["Write.", "Again."]},
        {"messages": [message], "temperature": 0.2, "max_tokens": 9, "metadata": {"task": "none"}},
        {"custom_id": "a", "body": {"prompt": "x", "metadata": {"task": "code", "segment": "s"}}},
    ]
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    assert read_prompts(path, ["code"]) == [
        EvaluatedPrompt("def\u2028f", task="code", segment="trial"),
        EvaluatedPrompt("Write.", ({"role": "user", "content": "Write."},), "code"),
        EvaluatedPrompt("Hello", (message,), "default", temperature=0.2, max_tokens=9),
        EvaluatedPrompt("x", task="code", segment="s"),
    ]


def test_a_limit_holds_for_each_temperature_apart():
    arguments = argparse.Namespace(temperatures=None, limit=1, max_tokens=9)
    cells = _cells([EvaluatedPrompt("a"), EvaluatedPrompt("b")], arguments)
    assert [len(each) for each in cells.values()] == [1, 1]


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"prompt": [1]}', '{"turns": []}', "3", ""])
def test_what_is_no_prompt_is_refused_with_its_line(tmp_path: Path, line: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with config_error(r"prompts\.jsonl(, line 1: not a|: there is no) prompt"):
        read_prompts(path, [])
    with config_error("cannot be read"):
        read_prompts(tmp_path / "none", [])


def test_a_configuration_is_run_and_its_random_drafter_found_useless(
    llama_folder: Path, draft_folder: Path, tmp_path: Path, run: Run
):
    small = {"device": "cpu", "threads": 1, "num_pages": 64}
    random = "benchmarks.never_slower.drafters:RandomDrafter"
    vocab_size = json.loads((llama_folder / "config.json").read_text())["vocab_size"]
    arguments = {
        "target": {"engine": {**small, "model": str(llama_folder)}},
        "drafters": {
            "lm": {"kind": "lm", "options": {"engine": {**small, "model": str(draft_folder)}}},
            "random": {"kind": random, "options": {"vocab_size": vocab_size}},
        },
        "tasks": {"default": ["lm"], "code": ["lm", "random"]},
        # It always verifies, so that nothing depends on the machine's speed.
        "coordinator": {"budget": "fixed", "max_draft_tokens": 4},
    }
    file, prompts = serve_file(tmp_path, arguments), tmp_path / "prompts.jsonl"
    tasks = ("code", "code", "code", "other")
    prompts.write_text(
        "\n".join(json.dumps({"prompt": f"{n} once", "task": task}) for n, task in enumerate(tasks))
    )
    options = "--max-tokens 24 --temperature 0 --json"
    judgements = json.loads(run("evaluate", file, prompts, *shlex.split(options)))
    assert [each["cell"]["task"] for each in judgements] == ["code", "default"]
    assert judgements[0]["found"]["count"] == 3
    assert "random" in judgements[0]["useless"]
