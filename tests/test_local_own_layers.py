"""The target's own layers, and what it thought likely before, draft for it: its text stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config.schema import Config, CoordinatorConfig, DrafterConfig, DrafterPlacement
from cluster.core import SamplingParams, SpeculationOptions
from cluster.local import LLM
from tests.support.local_models import PROMPTS, has_misses, hf_greedy, metrics_once, target

pytestmark = pytest.mark.usefixtures("tireless_residents")

GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=24)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "exit": ("early_exit", {"exit_layer": 2}),
    "skip": ("layer_skip", {"skip_layers": [1], "num_pages": 128}),
    "recycling": ("token_recycling", {}),
    "lookahead": ("lookahead", {}),
}


def config_of(folder: Path, names: list[str], **settings: Any) -> Config:
    return Config(
        target=target(folder, **settings),
        drafters={
            name: DrafterConfig(
                kind=KINDS[name][0],
                options=KINDS[name][1],
                placement=DrafterPlacement(host="target"),
            )
            for name in names
        },
        coordinator=CoordinatorConfig(budget="fixed", max_draft_tokens=8),
    )


# Each alone, and in other architectures all together.
ALONE = [("llama", [name]) for name in KINDS]
CASES = [*ALONE, *((each, list(KINDS)) for each in ("llama", "qwen3", "gemma2"))]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{'+'.join(case[1])}")
def case(request: pytest.FixtureRequest) -> tuple[str, list[str]]:
    found: tuple[str, list[str]] = request.param
    return found


@pytest.fixture(scope="module")
def folder(case: tuple[str, list[str]], checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory(case[0])


@pytest.fixture(scope="module")
def llm(case: tuple[str, list[str]], folder: Path) -> Iterator[LLM]:
    with LLM(config_of(folder, case[1])) as opened:
        yield opened


def test_greedy_text_is_what_transformers_generates(llm: LLM, folder: Path) -> None:
    for _ in range(2):  # the second time token recycling has seen all of it
        completions = llm.generate(PROMPTS, GREEDY)
        assert [each.token_ids for each in completions] == hf_greedy(folder, PROMPTS, 32)
    assert sum(each.stats.num_accepted_draft_tokens for each in completions) > 0


def test_sampled_text_is_the_same_without_drafts(llm: LLM) -> None:
    off = SpeculationOptions(enabled=False)
    for law in (SEEDED, replace(SEEDED, top_p=0.9), replace(SEEDED, repetition_penalty=1.3)):
        plain = [each.token_ids for each in llm.generate(PROMPTS, law, speculation=off)]
        drafted = llm.generate(PROMPTS, law)
        assert [each.token_ids for each in drafted] == plain
        assert sum(each.stats.num_draft_tokens for each in drafted) > 0


def test_preempted_requests_continue_with_the_same_text(llama_folder: Path) -> None:
    with LLM(config_of(llama_folder, list(KINDS), num_pages=12)) as tight:
        completions = tight.generate(PROMPTS, GREEDY)
        metrics_once(tight, has_misses)
    assert [each.token_ids for each in completions] == hf_greedy(llama_folder, PROMPTS, 32)
