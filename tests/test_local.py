"""`LLM` end to end on tiny checkpoints: the target's text, with any drafter."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from cluster.config.schema import Config, CoordinatorConfig, DrafterConfig
from cluster.core import (
    Commit,
    DraftTask,
    FinishReason,
    Observation,
    Proposal,
    SamplingParams,
    SpeculationOptions,
    TokenTree,
)
from cluster.draft.base import DrafterContext
from cluster.errors import NotFoundError, RequestError, WorkerError
from cluster.local import LLM
from cluster.spec.token_log import prefix_hash
from tests.support.local_models import (
    GREEDY,
    OPTIONS,
    PLAIN,
    PROMPTS,
    SEEDED,
    drafters,
    drafting,
    hf_greedy,
    metrics_once,
    target,
)

SPECULATION = {
    "all drafters": SpeculationOptions(),
    "lm": SpeculationOptions(drafters=("lm",)),
    "lookup": SpeculationOptions(drafters=("lookup",)),
    "ngram": SpeculationOptions(drafters=("ngram",)),
    "two nodes": SpeculationOptions(max_draft_tokens=2),
}


@pytest.fixture(scope="module")
def llm(llama_folder: Path, draft_folder: Path) -> Iterator[LLM]:
    """With drafters inside the target and one beside it."""
    with LLM(drafting(llama_folder, drafters(draft_folder, ("lookup",)))) as opened:
        yield opened


def test_one_request_at_a_time_gives_the_same_text(llm: LLM, llama_folder: Path) -> None:
    texts = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]
    assert texts == hf_greedy(llama_folder, PROMPTS, GREEDY.max_tokens)


@pytest.mark.parametrize("speculation", SPECULATION.values(), ids=SPECULATION.keys())
def test_speculation_does_not_change_any_sampled_text(
    llm: LLM, speculation: SpeculationOptions
) -> None:
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(OPTIONS))]
    params = list(OPTIONS.values())
    plain = llm.generate(prompts, params, speculation=PLAIN)
    drafted = llm.generate(prompts, params, speculation=speculation)
    assert all(c.stats.num_draft_tokens == 0 for c in plain)
    for name, before, after in zip(OPTIONS, plain, drafted, strict=True):
        assert after.token_ids == before.token_ids, name
        assert after.finish_reason is before.finish_reason, name


@pytest.fixture(scope="module")
def small(llama_folder: Path) -> Iterator[LLM]:
    settings = CoordinatorConfig(max_running_sequences=4, max_queued_requests=0)
    with LLM(Config(target=target(llama_folder), coordinator=settings)) as opened:
        yield opened


def test_text_prompts_give_texts(small: LLM) -> None:
    tokenizer = small.tokenizer
    assert tokenizer is not None
    completions = small.generate(["def main", "import os"], GREEDY, ignore_eos=True)
    for prompt, completion in zip(["def main", "import os"], completions, strict=True):
        again = small.generate(tokenizer.encode(prompt), GREEDY, ignore_eos=True)[0]
        assert completion.token_ids == again.token_ids
        assert len(completion.token_ids) == GREEDY.max_tokens
        assert completion.finish_reason is FinishReason.LENGTH
    assert any(completion.text for completion in completions)


def test_a_stop_string_ends_the_text_before_it(small: LLM) -> None:
    whole = small.generate("def main", GREEDY, ignore_eos=True)[0]
    stop = whole.text[len(whole.text) // 2 :][:3]
    cut = small.generate("def main", GREEDY, stop=[stop], ignore_eos=True)[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(whole.token_ids)
    assert cut.stats.num_steps > 0


def test_equal_prompts_without_a_seed_give_different_texts(small: LLM) -> None:
    drawn = small.generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=24), ignore_eos=True)
    again = small.generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=24), ignore_eos=True)
    assert len({tuple(completion.token_ids) for completion in drawn + again}) == 8
    assert len({completion.seed for completion in drawn + again}) == 8


def test_equal_prompts_with_one_seed_give_different_texts_every_time_the_same(small: LLM) -> None:
    first, second = (
        [c.token_ids for c in small.generate([[5, 6, 7]] * 4, SEEDED, ignore_eos=True)]
        for _ in range(2)
    )
    assert first == second
    assert len({tuple(token_ids) for token_ids in first}) == 4


def test_the_reported_seed_and_stream_reproduce_a_completion(small: LLM) -> None:
    for params in (SEEDED, replace(SEEDED, seed=None)):
        for completion in small.generate([[5, 6, 7]] * 3, params, ignore_eos=True):
            noise = replace(params, seed=completion.seed, stream=completion.stream)
            (again,) = small.generate([5, 6, 7], noise, ignore_eos=True)
            assert again.token_ids == completion.token_ids


def test_the_checkpoints_sampling_defaults_apply_unless_overridden(
    llama_folder: Path, tmp_path: Path
) -> None:
    values = {"top_k": 1, "max_new_tokens": 5, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    settings = replace(target(llama_folder), generation_config=str(tmp_path))
    with LLM(Config(target=settings)) as llm:
        assert llm.default_params == SamplingParams(top_k=1, max_tokens=5)
        (drawn,) = llm.generate([5, 6, 7], ignore_eos=True)
        (greedy,) = llm.generate([5, 6, 7], replace(GREEDY, max_tokens=5), ignore_eos=True)
        assert drawn.token_ids == greedy.token_ids


def test_more_prompts_than_running_sequences_wait(small: LLM) -> None:
    prompts = [[index + 3, 9] for index in range(12)]
    completions = small.generate(prompts, replace(GREEDY, max_tokens=4), ignore_eos=True)
    assert [len(completion.token_ids) for completion in completions] == [4] * 12


@pytest.mark.parametrize(
    ("prompts", "arguments", "error", "message"),
    [
        ([], {}, None, ""),
        ([[]], {}, RequestError, "no tokens"),
        ([[1] * 600], {}, RequestError, "600 tokens"),
        ([[1], [2]], {"params": [GREEDY]}, RequestError, "1 sampling parameters for 2 prompts"),
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
    error: type[Exception] | None,
    message: str,
) -> None:
    if error is None:
        assert small.generate(prompts) == []
        return
    with pytest.raises(error, match=message):
        small.generate(prompts, **arguments)  # type: ignore[arg-type]
    assert small.generate([5, 6], GREEDY)[0].finish_reason in FinishReason


async def test_it_works_where_an_event_loop_is_running(small: LLM) -> None:
    assert small.generate([5, 6], replace(GREEDY, max_tokens=3), ignore_eos=True)[0].token_ids


def test_closing_ends_every_thread(llama_folder: Path, draft_folder: Path) -> None:
    before = threading.active_count()
    mixed = drafters(draft_folder, ("lookup",))
    llm = LLM(Config(target=target(llama_folder), drafters=mixed))
    llm.generate([5, 6], GREEDY)
    llm.close()
    llm.close()
    assert threading.active_count() == before
    with pytest.raises(WorkerError, match="closed"):
        llm.generate([5, 6])


def test_a_text_ends_where_the_kv_pages_end(llama_folder: Path) -> None:
    settings = target(llama_folder, num_pages=4)  # 64 tokens, fewer than the model's own limit
    with LLM(Config(target=settings)) as tight:
        (completion,) = tight.generate([5, 6, 7], replace(GREEDY, max_tokens=200), ignore_eos=True)
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == 61


class Cyclic:
    """A plug-in whose trees are the same 80 nodes each time, whatever the parents are."""

    @dataclass(frozen=True)
    class Options:
        parents: str = "own"

    def __init__(self, context: DrafterContext, options: Options) -> None:
        own = np.arange(80, dtype=np.int32)
        parents = {"own": own, "next": own + 1, "far": np.full(80, 500, np.int32)}
        self._tree = TokenTree(own, parents[options.parents])
        self._texts: dict[str, list[int]] = {}
        self._grown: set[str] = set()

    def observe(self, commits: Sequence[Commit]) -> list[Observation]:
        for commit in commits:
            text = self._texts.setdefault(commit.request_id, [])
            text[commit.base_len :] = commit.token_ids.tolist()
        self._grown.clear()
        return [
            Observation(each.request_id, each.generation, len(self._texts[each.request_id]))
            for each in commits
        ]

    def propose(self, tasks: Sequence[DraftTask]) -> list[Proposal]:
        fresh = [task for task in tasks if task.request_id not in self._grown]
        self._grown.update(task.request_id for task in fresh)
        return [
            Proposal(
                task.request_id,
                task.generation,
                len(text := self._texts[task.request_id]),
                prefix_hash(text),
                self._tree,
                np.full(80, 0.5, np.float32),
                "cyclic",
            )
            for task in fresh
        ]

    def release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._texts.pop(request_id, None)


@pytest.mark.parametrize("parents", ["own", "next", "far"])
def test_a_plug_in_that_sends_no_trees_costs_no_request(llama_folder: Path, parents: str) -> None:
    drafter = DrafterConfig(kind=f"{__name__}:Cyclic", options={"parents": parents})
    config = Config(target=target(llama_folder), drafters={"cyclic": drafter})
    with LLM(config) as llm:
        for _ in range(2):
            completions = llm.generate(PROMPTS, GREEDY)
            assert [c.token_ids for c in completions] == hf_greedy(llama_folder, PROMPTS, 32)
        fault = 'drafthouse_drafter_faults_total{drafter="cyclic",process="target-'
        metrics_once(llm, lambda page: fault in page)
