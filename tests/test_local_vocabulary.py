"""A draft model of another vocabulary, end to end: speed changes, and no text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.schema import Config, CoordinatorConfig, DrafterConfig, DrafterPlacement
from cluster.core import SamplingParams
from cluster.local import LLM
from tests.support.draft.heads import VOCAB_SIZE, cyclic_target
from tests.support.draft.other_vocabulary import letters_tokenizer, other_copy
from tests.support.local_models import PROMPTS, hf_greedy, target
from tests.test_local import GREEDY, OPTIONS
from tests.test_local_heads import PLAIN, p_value

pytestmark = pytest.mark.usefixtures("tireless_residents")

PAIRS = range(260, 288)
MANY_TRIES = 50


def config_of(folder: Path, drafter: Path, host: str = "target") -> Config:
    engine = {"model": str(drafter), "dtype": "float32", "device": "cpu", "num_pages": 256}
    lm = DrafterConfig("lm", {"engine": engine}, placement=DrafterPlacement(host=host))
    budget = CoordinatorConfig(budget="fixed", max_draft_tokens=4)
    return Config(target=target(folder), drafters={"lm": lm}, coordinator=budget)


@pytest.mark.parametrize("host", ["target", ""], ids=["inside", "pool"])
def test_no_text_is_changed(host: str, llama_folder: Path, tmp_path: Path) -> None:
    """Prompts and texts have tokens that the model lacks."""
    drafter = other_copy(llama_folder, tmp_path / "other", left_out=PAIRS)
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(OPTIONS))]
    params = list(OPTIONS.values())
    with LLM(config_of(llama_folder, drafter, host)) as llm:
        greedy = [each.token_ids for each in llm.generate(PROMPTS, GREEDY)]
        plain = llm.generate(prompts, params, speculation=PLAIN)
        num_accepted = 0
        for _ in range(MANY_TRIES):  # on busy cores drafts of the pool come late
            drafted = llm.generate(prompts, params)
            for name, before, after in zip(OPTIONS, plain, drafted, strict=True):
                assert after.token_ids == before.token_ids, name
            num_accepted += sum(each.stats.num_accepted_draft_tokens for each in drafted)
            if num_accepted:
                break
    assert greedy == hf_greedy(llama_folder, PROMPTS, GREEDY.max_tokens)
    assert num_accepted > 0


def test_texts_follow_the_targets_law(tmp_path: Path) -> None:
    """The model numbers its tokens otherwise, and lacks some.  The control: texts drawn a little
    colder are convicted."""
    folder = cyclic_target(tmp_path / "target")
    letters_tokenizer(VOCAB_SIZE, folder)
    drafter = other_copy(folder, tmp_path / "other", left_out=(8, 9))
    warm = SamplingParams(temperature=2.0, max_tokens=24, seed=1)
    config = config_of(folder, drafter)
    engine = replace(config.target.engine, num_pages=512, max_batch_tokens=512)
    config = replace(config, target=replace(config.target, engine=engine))
    with LLM(config) as llm:
        found = llm.generate([[5, 6, 7]] * 160, warm, ignore_eos=True)
        colder = llm.generate([[5, 6, 7]] * 160, replace(warm, temperature=1.7), ignore_eos=True)
    # Of 3,840 tokens.
    assert sum(each.stats.num_accepted_draft_tokens for each in found) > 100
    assert p_value([each.token_ids for each in found], 2.0) > 1e-3
    assert p_value([each.token_ids for each in colder], 2.0) < 1e-6
