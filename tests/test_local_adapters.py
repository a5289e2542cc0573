"""`LLM`: adapters through coordinator, drafters and target, beside each other."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core import SamplingParams, SpeculationOptions
from cluster.errors import NotFoundError
from cluster.local import LLM
from tests.support.checkpoints import noisy_copy
from tests.support.engine.adapters import ATTENTION, EVERYTHING, write_adapter
from tests.support.local_models import PLAIN, PROMPTS, drafters, drafting, ids_of, metrics_once

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=20)


@pytest.fixture(scope="module")
def folders(checkpoint_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    root = tmp_path_factory.mktemp("adapters")
    base = checkpoint_factory("llama", head_dim=16)
    return base, {
        "a": write_adapter(base, root / "a", EVERYTHING, seed=1),
        "b": write_adapter(base, root / "b", ATTENTION, rank=3, seed=2),
        "c": write_adapter(base, root / "c", ("up_proj",), rank=7, seed=3),
    }


@pytest.fixture(scope="module")
def llm(
    folders: tuple[Path, dict[str, Path]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    base, adapters = folders
    named = {name: str(folder) for name, folder in adapters.items()}
    draft = noisy_copy(base, tmp_path_factory.mktemp("draft") / "noisy")
    config = drafting(base, drafters(draft))
    engine = replace(config.target.engine, adapters=named)
    with LLM(replace(config, target=replace(config.target, engine=engine))) as running:
        yield running


def test_a_seeded_text_is_the_same_with_and_without_drafts(llm: LLM):
    texts = [
        ids_of(llm.generate(PROMPTS, SEEDED, adapter="a", speculation=how))
        for how in (SpeculationOptions(), PLAIN)
    ]
    assert texts[0] == texts[1]


def test_acceptance_is_learned_for_each_adapter(llm: LLM):
    for name in ("a", "b"):
        llm.generate(PROMPTS, GREEDY, adapter=name)
    for name in ("a", "b"):
        metrics_once(llm, lambda page, task=f'task="default@{name}"': task in page)


def test_an_unknown_adapter_is_refused_by_name(llm: LLM):
    with pytest.raises(NotFoundError, match="'sql'; adapters: a, b, c"):
        llm.generate([5, 6], GREEDY, adapter="sql")
