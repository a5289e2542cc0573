"""The verifier on the real engine: with any drafts the text of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.engine.engine import Engine
from cluster.worker.verifier import Verifier
from tests.support.choices import by_day
from tests.support.engine.driver import load_engine, prompt
from tests.support.worker.rounds import (
    Drafter,
    Session,
    chain_of_the_truth,
    decode,
    decode_all,
    half_right,
    random_drafts,
)
from tests.worker.test_verifier_text import OPTIONS

NUM_TOKENS = 24
PROMPT = prompt(11, seed=3).tolist()


@pytest.fixture(scope="module")
def engine(llama_folder: Path) -> Engine:
    return load_engine(llama_folder)


def drafters_around(text: list[int], vocab_size: int) -> list[Drafter]:
    return [
        chain_of_the_truth(text),
        half_right(text, 1, vocab_size),
        half_right(text, 2, vocab_size),
        random_drafts(3, vocab_size, num_nodes=12),
    ]


@pytest.fixture(
    scope="module",
    params=by_day(
        ["mistral-sliding", "qwen3-moe"],
        ["qwen3", "mistral-sliding", "mixtral", "qwen3-moe", "phi3", "starcoder2"],
    ),
)
def other(request: pytest.FixtureRequest, checkpoint_factory: Callable[..., Path]) -> Engine:
    return load_engine(checkpoint_factory(request.param))


@pytest.mark.parametrize("name", ["greedy", "top_p", "everything"])
def test_other_architectures_keep_their_text_too(other: Engine, name: str) -> None:
    verifier = Verifier(other)
    plain = decode(verifier, PROMPT, OPTIONS[name], num_tokens=NUM_TOKENS + 5)

    for drafter in drafters_around(PROMPT + plain, other.vocab_size)[1:]:
        assert decode(verifier, PROMPT, OPTIONS[name], drafter, NUM_TOKENS) == plain[:NUM_TOKENS]


def test_preempted_requests_are_sent_again_and_keep_their_text(
    llama_folder: Path, engine: Engine
) -> None:
    names = ["greedy", "top_p", "penalties", "everything"]
    prompts = [prompt(8 + 3 * index, seed=index).tolist() for index in range(len(names))]
    plain = [
        decode(Verifier(engine), ids, OPTIONS[name], num_tokens=NUM_TOKENS)
        for ids, name in zip(prompts, names, strict=True)
    ]
    # Twenty pages of four tokens hold one or two of the four texts.
    small = load_engine(llama_folder, num_pages=20, prefix_cache=False)
    sessions = [Session(name, ids, OPTIONS[name]) for ids, name in zip(prompts, names, strict=True)]
    drafters = [
        half_right(ids + text, seed, engine.vocab_size)
        for seed, (ids, text) in enumerate(zip(prompts, plain, strict=True))
    ]

    decode_all(Verifier(small), sessions, drafters, NUM_TOKENS, release=True)

    assert [session.output[:NUM_TOKENS] for session in sessions] == plain
    assert sum(session.num_misses for session in sessions) > 0
    assert small.pages_in_use == 0
