"""Recorded sessions ask what an agent would ask, and every kind of turn is compared."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.agents.__main__ import measured
from benchmarks.agents.sessions import MAX_TOKENS, MODULES, TOOLS, session
from cluster.config.schema import Config
from tests.support.agents.plan import MODEL
from tests.support.agents.written import WritingTarget, chat_folder
from tests.support.deployments.scripted import Scripted, scripted


@pytest.mark.parametrize("module", MODULES)
def test_a_session_reads_edits_compiles_and_writes(module: str):
    turns = session(module)
    assert [turn.kind for turn in turns] == list(MAX_TOKENS)
    source = turns[1].body["messages"][-1]["content"]
    calls = [each for each in turns[-1].body["messages"] if each["role"] == "assistant"]
    _, edit, _, rewrite = [
        json.loads(each["tool_calls"][0]["function"]["arguments"]) for each in calls
    ]
    assert edit["old_text"] in source
    assert edit["old_text"] != edit["new_text"]
    assert edit["new_text"] in rewrite["content"]


def test_a_turn_has_all_that_was_said_before_it():
    turns = session(MODULES[0])
    for sooner, later in pairwise(turns):
        asked, then = sooner.body["messages"], later.body["messages"]
        assert then[: len(asked)] == asked
        assert [each["role"] for each in then[len(asked) :]] == ["assistant", "tool"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Scripted]:
    folder = chat_folder(tmp_path)
    target = WritingTarget(folder, lambda prompt: "a text of some tokens")
    room = {"max_context_len": 32768, "max_batch_tokens": 32768}
    with scripted(folder, Config(model_name=MODEL), target, **room) as site:
        yield site


async def test_every_kind_of_turn_is_compared_at_every_number_of_sessions(
    server: Scripted,
):
    fields = {"model": MODEL, "temperature": 0, "tools": TOOLS}
    rows = await measured(server.url, fields, MODULES[:2], [1, 2], rounds=1)
    assert [(row["sessions"], row["turn"]) for row in rows] == [
        (level, kind) for level in (1, 2) for kind in ("all", *MAX_TOKENS)
    ]
    assert [row["answers"] for row in rows] == 2 * [10, 2, 2, 2, 2, 2]
    assert all("(" in row["tokens/s of a request"] for row in rows), "two sessions, an interval"
