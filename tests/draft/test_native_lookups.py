"""Native and reference look-ups draft the same trees from the same commits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cluster.core import Commit, DraftTask, Proposal, SamplingParams, token_array
from cluster.draft import lookups
from cluster.draft.base import DrafterContext
from cluster.draft.inside import StepRows
from cluster.draft.native import lookups as native
from cluster.draft.prediction import PredictionDrafter, PredictionOptions
from cluster.draft.suffix import PromptLookupOptions, SuffixDrafter, SuffixOptions
from cluster.draft.token_recycling import (
    LookaheadOptions,
    TokenRecyclingDrafter,
    TokenRecyclingOptions,
)
from cluster.spec.token_log import prefix_hash
from tests.support.draft.step_rows import step_rows

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs a C++ compiler")

HOST: Any = object()
CONTEXT = DrafterContext("d", 24, 4, target=HOST)
NUM_TOP = 4
MAKERS: dict[str, Callable[[], Any]] = {
    "suffix": lambda: SuffixDrafter(CONTEXT, SuffixOptions(max_tokens=300)),
    "prompt_lookup": lambda: SuffixDrafter(CONTEXT, PromptLookupOptions(min_ngram=2)),
    "prediction": lambda: PredictionDrafter(CONTEXT, PredictionOptions()),
    "token_recycling": lambda: TokenRecyclingDrafter(
        CONTEXT, TokenRecyclingOptions(num_top=NUM_TOP, max_contexts=60)
    ),
    "lookahead": lambda: TokenRecyclingDrafter(
        CONTEXT, LookaheadOptions(num_top=NUM_TOP, max_contexts=60)
    ),
}


class Writer:
    """Writes the same random texts for two drafters, and compares what they draft."""

    def __init__(self, drafters: tuple[Any, Any], seed: int) -> None:
        self.drafters = drafters
        self.random = np.random.default_rng(seed)
        # Of each request: generation, text, the length of its prompt, its number as a text.
        self.held: dict[str, tuple[int, list[int], int]] = {}
        self.num_nodes = 0

    def words(self, count: int) -> list[int]:
        """Few words, often the same ones."""
        drawn: list[int] = (self.random.zipf(1.6, count) % 12).tolist()
        return drawn

    def step(self) -> None:
        commits, tasks = [], []
        for name in ("a", "b", "c"):
            action = self.random.integers(0, 20)
            if action == 0:
                for each in self.drafters:
                    each.release([name])
                self.held.pop(name, None)
            commits.append(self.commit(name, is_new_law=action == 1, is_cut=action == 2))
            max_nodes = int(self.random.integers(1, 25))
            tasks.append(DraftTask(name, self.held[name][0], max_nodes))
        ours, theirs = (each.observe(commits) for each in self.drafters)
        assert list(ours) == list(theirs)
        self.compare(*(each.propose(tasks) for each in self.drafters))
        if hasattr(self.drafters[0], "read"):
            rows = [self.rows(name) for name in self.held]
            for each in self.drafters:
                each.read(rows)

    def commit(self, name: str, *, is_new_law: bool, is_cut: bool) -> Commit:
        generation, text, prompt_len = self.held.get(name, (0, [], 0))
        opens = not text or is_new_law
        base_len = len(text)
        if opens:
            generation, base_len = generation + 1, 0
        if is_cut:
            base_len = int(self.random.integers(0, base_len + 1))
            text = text[:base_len]
        new = self.words(int(self.random.integers(1, 5)) if text else 30)
        prompt_len = prompt_len or 30
        text = text + new
        self.held[name] = (generation, text, prompt_len)
        seed = int(self.random.integers(0, 2**40))
        params = SamplingParams(
            temperature=float(seed % 3) / 2,
            seed=-seed,
            stream=seed % 5,
            max_tokens=200,
            min_tokens=20,
            stop_token_ids=(3, 7),
            prediction=tuple(self.words(seed % 90)),
        )
        return Commit(
            name,
            generation,
            base_len,
            prefix_hash(text[:base_len]),
            token_array(text[base_len:]),
            prompt_len,
            24,
            name if name == "c" else "default",
            params if base_len == 0 else None,
            b"tenant" if base_len == 0 else b"",
        )

    def rows(self, name: str) -> StepRows:
        """Of a step that verified a random tree behind the text."""
        generation, text, _ = self.held[name]
        num_nodes = int(self.random.integers(0, 6))
        parents = [int(self.random.integers(-1, node)) if node else -1 for node in range(num_nodes)]
        top = np.array([self.random.permutation(12)[:6] for _ in range(num_nodes + 1)], np.int32)
        logprobs = np.sort(self.random.normal(-2, 1, top.shape).astype(np.float32))[:, ::-1]
        return step_rows(
            [text[-1], *self.words(num_nodes)],
            top[:, :NUM_TOP],
            parents,
            logprobs[:, :NUM_TOP],
            request_id=name,
            generation=generation,
            task=name if name == "c" else "default",
            tenant=b"tenant",
            first_position=len(text) - 1,
        )

    def compare(self, ours: list[Proposal], theirs: list[Proposal]) -> None:
        assert [each.request_id for each in ours] == [each.request_id for each in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one.tree.token_ids.tolist() == other.tree.token_ids.tolist()
            assert one.tree.parents.tolist() == other.tree.parents.tolist()
            np.testing.assert_allclose(one.survival, other.survival, rtol=1e-6)
            assert (one.base_len, one.prefix_hash) == (other.base_len, other.prefix_hash)
            self.num_nodes += len(one.tree)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", MAKERS)
def test_both_ways_draft_the_same(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = MAKERS[kind]()
    with monkeypatch.context() as without:
        without.setattr(native, "is_available", lambda: False)
        theirs = MAKERS[kind]()
    writer = Writer((ours, theirs), seed)
    for _ in range(150):
        writer.step()
    assert writer.num_nodes > 300


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("position", [-2, 0, 9])
def test_both_ways_draw_the_same(temperature: float, position: int) -> None:
    random, texts = np.random.default_rng(3), (lookups.CountedText(), native.CountedText(()))
    token_ids = random.integers(0, 999, (40, 8)).astype(np.int32)
    logprobs = np.sort(random.normal(-2, 1, (40, 8)).astype(np.float32))[:, ::-1]
    for text in texts:
        text.set_law(SamplingParams(temperature=temperature, seed=-5, stream=2))
    ours, theirs = (text.draws(position, token_ids, logprobs) for text in texts)
    assert ours == theirs
    is_greedy = temperature == 0.0 or position < 0
    assert (ours == token_ids[:, 0].tolist()) == is_greedy


def test_a_store_forgets_alike() -> None:
    """Far more texts than it has room for, one of them longer than all of it."""
    writer = Writer((MAKERS["suffix"](), MAKERS["suffix"]()), 9)
    with pytest.MonkeyPatch.context() as without:
        without.setattr(native, "is_available", lambda: False)
        writer.drafters = (writer.drafters[0], MAKERS["suffix"]())
    for length in (5, 400, 20, 1, 149, 150, 151, 7, 30):
        name, text = f"text {length}", writer.words(10 + length)
        params = SamplingParams(temperature=0.0, max_tokens=1000)
        commit = Commit(name, 1, 0, 0, token_array(text), 10, 24, "default", params)
        for each in writer.drafters:
            each.observe([commit])
        writer.compare(*(each.propose([DraftTask(name, 1, 24)]) for each in writer.drafters))
        for each in writer.drafters:
            each.release([name])
        held = [len(each._outputs((b"", "default"))) for each in writer.drafters]
        assert held[0] == held[1] <= 300
