"""Another engine drafts over HTTP: the text is the target's, whatever the engine says or does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config.schema import Config, CoordinatorConfig, DrafterConfig, DrafterPlacement
from cluster.core import SamplingParams, SpeculationOptions
from cluster.local import LLM, Completion
from tests.support.draft.scripted_engine import (
    Pieces,
    ScriptedEngine,
    event,
    head,
    says,
    scripted,
    sends,
)
from tests.support.local_models import target

pytestmark = pytest.mark.usefixtures("tireless_residents")

# The tiny model's own texts are no UTF-8.  These are of "!" to "`", which no merge joins.
ASCII = tuple((token, 50.0) for token in range(4, 68))
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, logit_bias=ASCII)
SEEDED = replace(GREEDY, temperature=0.9, seed=5)
LAWS = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
PROMPTS = ["once upon a time", "the end of it"]
OFF = SpeculationOptions(enabled=False)


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with scripted(says()) as running:
        yield running


@pytest.fixture(scope="module", params=["target", ""], ids=["inside", "beside"])
def llm(
    request: pytest.FixtureRequest, engine: ScriptedEngine, llama_folder: Path
) -> Iterator[LLM]:
    peer = DrafterConfig(
        kind="openai",
        options={"url": engine.url, "timeout_s": 30.0, "rest_s": 0.0},
        placement=DrafterPlacement(host=request.param),
    )
    config = Config(
        target=target(llama_folder),
        drafters={"peer": peer},
        coordinator=CoordinatorConfig(budget="fixed", max_draft_tokens=8),
    )
    with LLM(config) as opened:
        yield opened


def written(llm: LLM, params: SamplingParams, speculation: SpeculationOptions) -> list[Completion]:
    return list(llm.generate(PROMPTS, params, speculation=speculation, ignore_eos=True))


@LAWS
def test_no_answer_changes_the_text(
    llm: LLM, engine: ScriptedEngine, params: SamplingParams
) -> None:
    plain = [each.token_ids for each in written(llm, params, OFF)]
    nonsense = says("it was a dark ", "and stormy night \ufffd and so on")
    for script in (nonsense, sends(head("500 No")), sends(b"\xff"), says("", reason="stop")):
        engine.script = script
        count = len(engine.requests)
        drafted = written(llm, params, SpeculationOptions())
        assert [each.token_ids for each in drafted] == plain
        assert len(engine.requests) > count


@LAWS
def test_an_engine_that_foretells_the_text_saves_steps(
    llm: LLM, engine: ScriptedEngine, params: SamplingParams
) -> None:
    plain = written(llm, params, OFF)
    wholes = [prompt + each.text for prompt, each in zip(PROMPTS, plain, strict=True)]

    async def knows(body: dict[str, Any]) -> Pieces:
        prompt = body["prompt"]
        (whole,) = (each for each in wholes if each.startswith(prompt))
        yield head()
        yield event(whole[len(prompt) :][: body["max_tokens"]], "length")

    engine.script = knows
    # Nobody waits for an engine, so a run may find it late.
    for _ in range(50):
        drafted = written(llm, params, SpeculationOptions())
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
        if sum(each.stats.accepted_by_drafter.get("peer", 0) for each in drafted) > 20:
            return
    raise AssertionError("no run had the engine's drafts in time")
