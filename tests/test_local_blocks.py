"""Block drafters and multi-token prediction, end to end: the target's text, drafted for or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.core import SamplingParams
from cluster.local import LLM
from tests.support.draft.blocks import random_block, right_block
from tests.support.draft.heads import cyclic_target
from tests.support.draft.mtp import SIZE, right_mtp, with_mtp
from tests.support.local_models import PROMPTS, hf_greedy
from tests.test_local import GREEDY, OPTIONS
from tests.test_local_heads import PLAIN, config_of, p_value

pytestmark = pytest.mark.usefixtures("tireless_residents")

Factory = Callable[..., Path]


def dflash(folder: Path, factory: Factory) -> tuple[Path, str, Path]:
    target = factory("mistral-sliding")
    return target, "block", random_block(folder, target, spark=False)


def dspark(folder: Path, factory: Factory) -> tuple[Path, str, Path]:
    target = factory("llama")
    return target, "block", random_block(folder, target, spark=True)


def glm(folder: Path, factory: Factory) -> tuple[Path, str, Path]:
    with_mtp("glm4-moe", folder)
    return folder, "mtp", folder


# A pool drafter beside it, or none.
CASES = [(dflash, False), (dspark, False), (dspark, True), (glm, False), (glm, True)]


@pytest.mark.parametrize(("make", "pooled"), CASES)
def test_it_changes_no_text(
    make: Callable[[Path, Factory], tuple[Path, str, Path]], pooled: bool, tmp_path: Path,
    checkpoint_factory: Factory,
) -> None:  # fmt: skip
    """Greedy is what transformers generates and sampled what it is without drafts, where pages are
    few and prompts are read in chunks; the second time they are cached."""
    target, kind, head = make(tmp_path, checkpoint_factory)
    with LLM(config_of(target, kind, head, pooled=pooled, num_pages=16)) as llm:
        expected = hf_greedy(target, PROMPTS, GREEDY.max_tokens)
        for _ in range(2):
            completions = llm.generate(PROMPTS, GREEDY)
            assert [each.token_ids for each in completions] == expected
        assert sum(each.stats.num_draft_tokens for each in completions) > 0
        prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(OPTIONS))]
        params = list(OPTIONS.values())
        plain = llm.generate(prompts, params, speculation=PLAIN)
        drafted = llm.generate(prompts, params)
    assert sum(each.stats.num_draft_tokens for each in drafted) > 0
    for name, before, after in zip(OPTIONS, plain, drafted, strict=True):
        assert after.token_ids == before.token_ids, name


@pytest.mark.parametrize("fill", [float("nan"), 0.0, 1e30])
@pytest.mark.parametrize("kind", ["dflash", "dspark", "mtp"])
def test_numbers_without_sense_cost_speed_only(
    kind: str, fill: float, llama_folder: Path, tmp_path: Path
) -> None:
    target, head = llama_folder, tmp_path
    if kind == "mtp":
        target = tmp_path
        with_mtp("glm4-moe", tmp_path, eh_proj__weight=torch.full((SIZE, 2 * SIZE), fill))
    else:
        random_block(tmp_path, target, spark=kind == "dspark", fill=fill)
    drafter = "mtp" if kind == "mtp" else "block"
    with LLM(config_of(target, drafter, head, pooled=False, num_pages=64)) as llm:
        texts = [each.token_ids for each in llm.generate(PROMPTS, GREEDY)]
    assert texts == hf_greedy(target, PROMPTS, GREEDY.max_tokens)


@pytest.mark.parametrize("kind", ["block", "mtp"])
def test_texts_follow_the_targets_law(kind: str, tmp_path: Path) -> None:
    """The drafts are often right, and half of the law's mass is elsewhere.  The control: texts
    drawn a little colder are convicted."""
    target = right_mtp(tmp_path) if kind == "mtp" else cyclic_target(tmp_path / "target")
    head = target if kind == "mtp" else right_block(tmp_path / "head")
    warm = SamplingParams(temperature=2.0, max_tokens=8, seed=1)
    with LLM(config_of(target, kind, head, pooled=False, num_pages=512)) as llm:
        found = llm.generate([[5, 6, 7]] * 500, warm, ignore_eos=True)
        colder = llm.generate([[5, 6, 7]] * 500, replace(warm, temperature=1.7), ignore_eos=True)
    # How many depends on the load: the budget prices steps by the clock.
    assert sum(each.stats.num_accepted_draft_tokens for each in found) > 50
    assert p_value([each.token_ids for each in found], 2.0) > 1e-3
    assert p_value([each.token_ids for each in colder], 2.0) < 1e-6
