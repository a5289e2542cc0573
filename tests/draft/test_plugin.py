"""The drafter that docs/own-drafter.md shows works as printed, and keeps the protocol."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from cluster.config.parse import parse
from cluster.config.schema import (
    Config,
    CoordinatorConfig,
    DrafterConfig,
    EngineConfig,
    TargetConfig,
)
from cluster.core import SamplingParams, SpeculationOptions
from cluster.draft import plugin
from cluster.draft.base import Drafter, DrafterContext
from cluster.draft.registry import create, search_in
from cluster.local import LLM
from tests.draft.test_protocol import MAX_NODES, MAX_REQUESTS, Conversation
from tests.support.draft.author import Author, write

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-drafter.md"
CONTEXT = DrafterContext("echo", MAX_NODES, MAX_REQUESTS)


def block(language: str) -> str:
    """The page's only block of that language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[0]


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DrafterConfig]:
    """The page's drafter, saved where the page says, as the page's configuration names it."""
    source = block("python")
    name = source.splitlines()[0].removeprefix("# ")
    (tmp_path / name).write_text(source)
    monkeypatch.setattr(sys, "path", list(sys.path))
    search_in(tmp_path)
    importlib.invalidate_caches()
    yield parse(DrafterConfig, yaml.safe_load(block("yaml"))["drafters"]["echo"])
    sys.modules.pop("echo", None)


def test_the_pages_drafter_drafts_what_followed_before(drafter: DrafterConfig):
    proposal = write(create("echo", drafter, CONTEXT), Author([1, 2, 3, 4, 5, 9, 1, 2, 3]), [])
    assert proposal.tree.token_ids.tolist() == [4, 5, 9, 1, 2, 3]
    assert proposal.is_complete


def test_the_pages_drafter_keeps_the_protocol(drafter: DrafterConfig):
    class EchoConversation(Conversation):
        def make(self) -> Drafter:
            return create("echo", drafter, CONTEXT)

    run_state_machine_as_test(EchoConversation, settings=settings(stateful_step_count=20))


def test_the_pages_drafter_makes_answers_faster_and_does_not_change_them(
    drafter: DrafterConfig, llama_folder: Path
):
    config = Config(
        target=TargetConfig(engine=EngineConfig(model=str(llama_folder), device="cpu", threads=1)),
        drafters={"echo": drafter},
        coordinator=CoordinatorConfig(budget="fixed"),
    )
    prompt = [9, 8, 7, 6, 5, 4] * 4
    # Of two tokens, so that what stood there before often comes again.
    bias = ((9, 50.0), (8, 50.0))
    # So many tokens, because no step waits for a drafter, which may be slow on a busy machine.
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=400, logit_bias=bias)
    with LLM(config) as llm:
        plain, drafted = (
            llm.generate([prompt], params, speculation=SpeculationOptions(enabled=enabled))[0]
            for enabled in (False, True)
        )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_accepted_draft_tokens > 0


def test_every_name_that_the_page_lists_is_there():
    section = PAGE.read_text("utf-8").partition("## What is there to build with")[2]
    table = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    names = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    assert names <= set(plugin.__all__)
    assert len(names) > 9
    assert all(hasattr(plugin, name) for name in plugin.__all__)
