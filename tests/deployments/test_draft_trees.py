"""`return_draft_trees`: what an answer shows of its steps, to whom, and how much of it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from cluster.client.generated import generation_pb2
from cluster.config.schema import Config, DrafterConfig
from cluster.core import EMPTY_TOKENS, TokenArray, token_array
from cluster.requests.fields import DraftStep
from deployments.ingress.openai_response import written
from deployments.ingress.ticket import MAX_NODES, StepTrace
from tests.support.coordinator.toys import ToyDrafter, oracle_chain
from tests.support.deployments.api import Json, events
from tests.support.deployments.place import generate, place, write_keys
from tests.support.text.tokenizers_for_tests import (
    byte_fallback_folder,
    byte_level_folder,
    small_tokenizer,
)

CONFIG = Config(drafters={"right": DrafterConfig(kind="prompt_lookup")})
PATHS = ["/v1/completions", "/v1/chat/completions"]
ASKED = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "seed": 3}
TREES = {"return_draft_trees": True, "cache_salt": "mine"}


def chunks(answer: httpx.Response) -> list[Json]:
    assert answer.status_code == 200, answer.text
    return [event["choices"][0] for event in events(answer.text)]


def tokens_of(step: Json) -> list[int]:
    path = [step["nodes"][node][1] for node in step["path"]]
    return path if step["own"] is None else [*path, step["own"][0]]


@pytest.mark.parametrize("path", PATHS)
async def test_the_steps_are_the_text_whole_and_streamed(path: str):
    async with place(CONFIG) as here:
        here.rooms.add_drafter(ToyDrafter("right", oracle_chain(3)))
        plain = (await here.ask(path, **ASKED, return_token_ids=True)).json()["choices"][0]
        shown = (await here.ask(path, **ASKED, **TREES, return_token_ids=True)).json()["choices"][0]
        streamed = chunks(await here.ask(path, **ASKED, **TREES, stream=True))
    steps = shown["draft_steps"]
    tokens = [token for step in steps for token in tokens_of(step)]
    assert tokens == shown["token_ids"] == plain["token_ids"]
    assert "draft_steps" not in plain
    assert [step["n"] for step in steps] == list(range(len(steps)))
    assert all(step["drafters"] == ["right"] for step in steps)
    assert any(step["path"] for step in steps)
    assert {tuple(step) for step in steps} == {
        ("n", "at_ms", "drafters", "nodes", "path", "own", "ms", "batch", "why")
    }
    for step in steps:
        for parent, token, text, survival, bits in step["nodes"]:
            assert (text, bits) == (here.ingress.tokenizer.token_text(token), 1)
            assert -1 <= parent < len(step["nodes"])
            assert 0.0 <= survival <= 1.0
    times = [step["at_ms"] for step in steps]
    assert times == sorted(times)
    again = [step for chunk in streamed for step in chunk.get("draft_steps", [])]
    assert [tokens_of(step) for step in again] == [tokens_of(step) for step in steps]


@pytest.mark.parametrize("path", PATHS)
async def test_a_key_is_shown_trees_as_a_salt_is(path: str, tmp_path: Path):
    """Nobody else is: bodies.yaml has who asks without."""
    keys = write_keys(tmp_path / "keys.yaml", alice={})
    async with place(replace(CONFIG, access=keys)) as here:
        answer = await here.ask(path, key="alice", return_draft_trees=True)
        assert answer.json()["choices"][0]["draft_steps"]


async def test_grpc_shows_the_same_to_the_same():
    trees = generation_pb2.SpeculationRequest(return_draft_trees=True)
    async with place(CONFIG) as here, here.listening() as (channel, _):
        answers = [
            generation_pb2.GenerateResponse.FromString(answer)
            async for answer in generate(channel, speculation=trees, cache_salt="mine")
        ]
        with pytest.raises(grpc.aio.AioRpcError, match="cache_salt") as caught:
            await generate(channel, speculation=trees).read()
    at_fault = ("drafthouse-param", "speculation.return_draft_trees")
    assert at_fault in list(caught.value.trailing_metadata())
    deltas = [choice for answer in answers for choice in answer.choices]
    tokens = [token for delta in deltas for token in delta.token_ids]
    steps = [step for delta in deltas for step in delta.draft_steps]
    assert [step.number for step in steps] == list(range(len(steps)))
    # Where the text ends, the target has no token of its own to show.
    assert [token for step in steps for token in step.own_token_ids] == tokens


def step(token_ids: Sequence[int], own: TokenArray = EMPTY_TOKENS) -> DraftStep:
    """One that has verified a chain of these."""
    count = len(token_ids)
    parents = token_array(range(-1, count - 1))
    ones = np.ones(count, np.float32), np.ones(count, np.uint32)
    return DraftStep(("a",), token_array(token_ids), parents, *ones, EMPTY_TOKENS, own)


@pytest.mark.parametrize("num_nodes", [0, 1, 60])
def test_what_a_choice_shows_is_bounded_and_has_no_holes(num_nodes: int):
    trace = StepTrace()
    kept = [each for _ in range(5000) for each in trace.take([step(range(num_nodes))])]
    assert len(kept) == MAX_NODES // max(num_nodes, 1)
    assert trace.num_dropped == 5000 - len(kept)
    assert [each.number for each in kept] == list(range(len(kept)))
    assert trace.take([step(())]) == ()


async def test_an_answer_says_how_many_steps_it_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployments.ingress.ticket.MAX_NODES", 3)
    async with place(CONFIG) as here:
        whole = (await here.ask(PATHS[0], **ASKED, **TREES)).json()["choices"][0]
        streamed = chunks(await here.ask(PATHS[0], **ASKED, **TREES, stream=True))
    assert (len(whole["draft_steps"]), whole["draft_steps_dropped"]) == (3, 21)
    assert streamed[-1]["draft_steps_dropped"] == 21
    assert sum(len(chunk["draft_steps"]) for chunk in streamed) == 3


@pytest.mark.parametrize("make", [byte_level_folder, byte_fallback_folder])
def test_a_piece_of_a_character_is_text_in_json(make: Any):
    tokenizer = small_tokenizer(make)
    ids = tokenizer.encode("\N{OGHAM LETTER BEITH}", add_special_tokens=False)
    assert len(ids) > 1
    shown = written(step(ids, own=ids[:1]), tokenizer)
    assert json.loads(json.dumps(shown)) == json.loads(json.dumps(shown, ensure_ascii=False))
    assert all(isinstance(node[2], str) for node in shown["nodes"])
    assert "\N{REPLACEMENT CHARACTER}" in {node[2] for node in shown["nodes"]}
