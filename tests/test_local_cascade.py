"""Cascades of any kinds: the target's text, and drafts that are accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config.schema import Config, CoordinatorConfig, DrafterConfig
from cluster.core import SamplingParams, SpeculationOptions
from cluster.local import LLM
from tests.support.checkpoints import noisy_copy
from tests.support.local_models import PROMPTS, drafters, hf_greedy, metrics_once, target

pytestmark = pytest.mark.usefixtures("tireless_residents")

GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=24)
# A stage that is never sure hands everything over.
STAGES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "look-up and model": (["lookup", "lm"], {}),
    "all is judged": (["lookup", "lm"], {"thresholds": [1.0]}),
    "three": (["recycling", "skip", "lm"], {"thresholds": [0.9, 0.9]}),
    "an exit": (["lookup", "exit"], {"thresholds": [1.0]}),
}


def config_of(folder: Path, draft: Path, stages: list[str], options: dict[str, Any]) -> Config:
    known = {
        **drafters(draft),
        "recycling": DrafterConfig(kind="token_recycling"),
        "skip": DrafterConfig(kind="layer_skip", options={"skip_layers": [1], "num_pages": 128}),
        "exit": DrafterConfig(kind="early_exit", options={"exit_layer": 2}),
    }
    cascade = DrafterConfig(kind="cascade", options={"stages": stages, **options})
    return Config(
        target=target(folder),
        drafters={**{name: known[name] for name in stages}, "cascade": cascade},
        coordinator=CoordinatorConfig(budget="fixed", max_draft_tokens=8),
    )


@pytest.fixture(scope="module", params=STAGES)
def llm(
    request: pytest.FixtureRequest, llama_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    draft = noisy_copy(llama_folder, tmp_path_factory.mktemp("draft") / "noisy")
    with LLM(config_of(llama_folder, draft, *STAGES[request.param])) as opened:
        yield opened


def test_greedy_text_is_what_transformers_generates(llm: LLM, llama_folder: Path) -> None:
    completions = llm.generate(PROMPTS, GREEDY)
    assert [each.token_ids for each in completions] == hf_greedy(llama_folder, PROMPTS, 32)
    assert sum(each.stats.accepted_by_drafter.get("cascade", 0) for each in completions) > 0


def test_sampled_text_is_the_same_without_drafts(llm: LLM) -> None:
    off = SpeculationOptions(enabled=False)
    for law in (SEEDED, replace(SEEDED, top_p=0.9), replace(SEEDED, repetition_penalty=1.3)):
        plain = [each.token_ids for each in llm.generate(PROMPTS, law, speculation=off)]
        drafted = llm.generate(PROMPTS, law)
        assert [each.token_ids for each in drafted] == plain
        assert sum(each.stats.num_draft_tokens for each in drafted) > 0


def test_the_time_of_all_stages_counts(llm: LLM) -> None:
    llm.generate(PROMPTS, GREEDY)
    page = metrics_once(llm, lambda page: "draft_seconds_total{" in page)
    lines = [line for line in page.splitlines() if "draft_seconds_total{" in line]
    assert [line.split('"')[1] for line in lines] == ["cascade"]
    assert float(lines[0].split()[-1]) > 0.0
