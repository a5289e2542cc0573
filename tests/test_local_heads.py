"""Draft heads inside the target, end to end: the target's text, alone and beside a pool drafter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from cluster.config.schema import Config, CoordinatorConfig, DrafterConfig, TargetConfig
from cluster.core import SamplingParams, SpeculationOptions
from cluster.local import LLM
from tests.support.draft.heads import (
    SURENESS,
    VOCAB_SIZE,
    cyclic_target,
    random_eagle3,
    random_medusa,
    random_peagle,
    right_eagle3,
    right_medusa,
    right_peagle,
)
from tests.support.local_models import PROMPTS, drafters, engine, hf_greedy
from tests.test_local import GREEDY, OPTIONS

pytestmark = pytest.mark.usefixtures("tireless_residents")

KINDS = {"eagle3": random_eagle3, "medusa": random_medusa, "peagle": random_peagle}
CASES = [
    ("llama", "eagle3", False), ("llama", "eagle3", True), ("llama", "medusa", True),
    ("mistral-sliding", "eagle3", False), ("gemma2", "medusa", False),
    ("llama", "peagle", True), ("mistral-sliding", "peagle", False),
]  # fmt: skip
PLAIN = SpeculationOptions(enabled=False)


def config_of(
    target: Path, kind: str, head: Path, *, pooled: bool, num_pages: int, max_rows: int = 48
) -> Config:
    """Prompts are read in chunks of max_rows.  pooled: with a look-up beside the target."""
    pool = drafters(target, pool=("lookup",))["lookup"]
    own = DrafterConfig(kind=kind, options={"model": str(head)})
    return Config(
        target=TargetConfig(engine=replace(engine(target, num_pages), max_batch_tokens=max_rows)),
        drafters={"head": own, "lookup": pool} if pooled else {"head": own},
        # A fixed budget verifies drafts in every step.
        coordinator=CoordinatorConfig(budget="fixed", max_draft_tokens=8),
    )


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request: pytest.FixtureRequest) -> tuple[str, str, bool]:
    found: tuple[str, str, bool] = request.param
    return found


@pytest.fixture(scope="module")
def folder(case: tuple[str, str, bool], checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory(case[0])


@pytest.fixture(scope="module")
def llm(
    case: tuple[str, str, bool], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    _, kind, pooled = case
    head = KINDS[kind](tmp_path_factory.mktemp("heads") / kind, folder)
    with LLM(config_of(folder, kind, head, pooled=pooled, num_pages=16)) as opened:
        yield opened


def test_greedy_text_is_what_transformers_generates(llm: LLM, folder: Path) -> None:
    """Where pages are few and prompts are read in chunks; the second time they are cached."""
    expected = hf_greedy(folder, PROMPTS, GREEDY.max_tokens)
    for _ in range(2):
        completions = llm.generate(PROMPTS, GREEDY)
        assert [each.token_ids for each in completions] == expected
    assert sum(each.stats.num_draft_tokens for each in completions) > 0


def test_no_sampled_text_is_changed(llm: LLM) -> None:
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(OPTIONS))]
    params = list(OPTIONS.values())
    plain = llm.generate(prompts, params, speculation=PLAIN)
    drafted = llm.generate(prompts, params)
    assert sum(each.stats.num_draft_tokens for each in drafted) > 0
    assert all(each.stats.num_draft_tokens == 0 for each in plain)
    for name, before, after in zip(OPTIONS, plain, drafted, strict=True):
        assert after.token_ids == before.token_ids, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fill", [float("nan"), 0.0, 1e30])
def test_numbers_without_sense_cost_speed_only(
    kind: str, fill: float, llama_folder: Path, tmp_path: Path
) -> None:
    head = KINDS[kind](tmp_path, llama_folder, fill=fill)
    with LLM(config_of(llama_folder, kind, head, pooled=False, num_pages=64)) as llm:
        texts = [each.token_ids for each in llm.generate(PROMPTS, GREEDY)]
    assert texts == hf_greedy(llama_folder, PROMPTS, GREEDY.max_tokens)


RIGHT = {"eagle3": right_eagle3, "medusa": right_medusa, "peagle": right_peagle}


@pytest.mark.parametrize(("kind", "pooled"), zip(RIGHT, (False, True, False), strict=True))
def test_texts_follow_the_targets_law(kind: str, pooled: bool, tmp_path: Path) -> None:
    """The drafts are often right, and half of the law's mass is elsewhere.  The control: texts
    drawn a little colder are convicted."""
    target, head = cyclic_target(tmp_path / "target"), RIGHT[kind](tmp_path / "head")
    warm = SamplingParams(temperature=2.0, max_tokens=24, seed=1)
    config = config_of(target, kind, head, pooled=pooled, num_pages=512, max_rows=512)
    with LLM(config) as llm:
        found = llm.generate([[5, 6, 7]] * 160, warm, ignore_eos=True)
        colder = llm.generate([[5, 6, 7]] * 160, replace(warm, temperature=1.7), ignore_eos=True)
    # Of 3,840 tokens.
    assert sum(each.stats.num_accepted_draft_tokens for each in found) > 100
    assert p_value([each.token_ids for each in found], 2.0) > 1e-3
    assert p_value([each.token_ids for each in colder], 2.0) < 1e-6


def p_value(texts: list[list[int]], temperature: float) -> float:
    """Chi-squared: how far each token is from the one before, by the law of `cyclic_target`."""
    steps = Counter(
        (after - before) % VOCAB_SIZE
        for text in texts
        for before, after in zip([7, *text], text, strict=False)
    )
    logits = np.zeros(VOCAB_SIZE)
    logits[1] = SURENESS / temperature
    law = np.exp(logits) / np.exp(logits).sum()
    seen = np.array([steps[index] for index in range(VOCAB_SIZE)])
    return float(stats.chisquare(seen, law * seen.sum()).pvalue)
