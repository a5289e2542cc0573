"""`LLM` end to end on tiny checkpoints: the target's text, with any drafter."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.schema import Config, CoordinatorConfig
from cluster.core import FinishReason, SpeculationOptions
from cluster.errors import NotFoundError, RequestError, WorkerError
from cluster.local import LLM
from tests.support.local_models import GREEDY, SEEDED, drafters, ids_of, target


@pytest.fixture(scope="module")
def small(llama_folder: Path) -> Iterator[LLM]:
    settings = CoordinatorConfig(max_running_sequences=4, max_queued_requests=0)
    with LLM(Config(target=target(llama_folder), coordinator=settings)) as opened:
        yield opened


def test_text_prompts_give_texts(small: LLM):
    tokenizer = small.tokenizer
    completions = small.generate(["def main", "import os"], GREEDY, ignore_eos=True)
    for prompt, completion in zip(["def main", "import os"], completions, strict=True):
        again = small.generate(tokenizer.encode(prompt), GREEDY, ignore_eos=True)[0]
        assert completion.token_ids == again.token_ids
        assert len(completion.token_ids) == GREEDY.max_tokens
        assert completion.finish_reason is FinishReason.LENGTH
    assert any(completion.text for completion in completions)


def test_a_stop_string_ends_the_text_before_it(small: LLM):
    whole = small.generate("def main", GREEDY, ignore_eos=True)[0]
    stop = whole.text[len(whole.text) // 2 :][:3]
    cut = small.generate("def main", GREEDY, stop=[stop], ignore_eos=True)[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(whole.token_ids)
    assert cut.stats.num_steps > 0


def test_equal_prompts_with_one_seed_give_different_texts_every_time_the_same(small: LLM):
    first, second = (
        ids_of(small.generate([[5, 6, 7]] * 4, SEEDED, ignore_eos=True)) for _ in range(2)
    )
    assert first == second
    assert len({tuple(token_ids) for token_ids in first}) == 4


def test_the_reported_seed_and_stream_reproduce_a_completion(small: LLM):
    for params in (SEEDED, replace(SEEDED, seed=None)):
        for completion in small.generate([[5, 6, 7]] * 3, params, ignore_eos=True):
            noise = replace(params, seed=completion.seed, stream=completion.stream)
            (again,) = small.generate([5, 6, 7], noise, ignore_eos=True)
            assert again.token_ids == completion.token_ids


@pytest.mark.parametrize(
    ("prompts", "arguments", "error", "message"),
    [
        ([[]], {}, RequestError, "no tokens"),
        ([[1] * 600], {}, RequestError, "600 tokens"),
        ([[1], [2]], {"params": [GREEDY]}, RequestError, "1 sampling parameters for 2 prompts"),
        (
            [[5]],
            {"params": replace(GREEDY, forced_ids=(5, 6))},
            RequestError,
            "forced_ids are 2 tokens",
        ),
        (
            [[5]],
            {"params": replace(GREEDY, max_tokens=2, forced_ids=(5, 10**6))},
            RequestError,
            "forced_ids names token 1000000",
        ),
        (
            [[1]],
            {"speculation": SpeculationOptions(drafters=("x",))},
            NotFoundError,
            "no drafter is named 'x'",
        ),
    ],
)
def test_requests_that_cannot_be_served_raise(
    small: LLM,
    prompts: list[list[int]],
    arguments: dict[str, object],
    error: type[Exception],
    message: str,
):
    with pytest.raises(error, match=message):
        small.generate(prompts, **arguments)
    assert small.generate([5, 6], GREEDY)[0].finish_reason in FinishReason


async def test_it_works_where_an_event_loop_is_running(small: LLM):
    assert small.generate([]) == []
    assert small.generate([5, 6], replace(GREEDY, max_tokens=3), ignore_eos=True)[0].token_ids


def test_closing_ends_every_thread(llama_folder: Path, draft_folder: Path):
    before = set(threading.enumerate())
    mixed = drafters(draft_folder, ("lookup",))
    llm = LLM(Config(target=target(llama_folder), drafters=mixed))
    llm.generate([5, 6], GREEDY)
    llm.close()
    llm.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(WorkerError, match="closed"):
        llm.generate([5, 6])


def test_a_text_ends_where_the_kv_pages_end(llama_folder: Path):
    settings = target(llama_folder, num_pages=4)  # 64 tokens, fewer than the model's own limit
    with LLM(Config(target=settings)) as tight:
        (completion,) = tight.generate([5, 6, 7], replace(GREEDY, max_tokens=200), ignore_eos=True)
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == 61
