"""Where every layer has a window, a sequence holds the pages of the window and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.core import TokenArray, TokenTree, token_array
from cluster.engine.engine import Engine, Output, Work
from cluster.spec.token_log import prefix_hash
from tests.support.checkpoints import SLIDING_WINDOW
from tests.support.engine.driver import (
    GreedyDecoder,
    expected_rows,
    generate,
    last_logits,
    load_engine,
    load_oracle,
    prompt,
    rows,
    run,
)

CLOSE = {"atol": 2e-5, "rtol": 2e-5}
PAGE_SIZE = 4
TREE = TokenTree.of([5, 6, 7, 8], [-1, 0, 0, -1])


@pytest.fixture(scope="module")
def folder(checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory("mistral-sliding")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return load_oracle(folder)


def most_pages(num_rows: int) -> int:
    """Of one sequence where so many rows are written in a step."""
    return -(-(SLIDING_WINDOW + num_rows) // PAGE_SIZE) + 2


class Watched:
    """Steps an engine and notes the most pages that were held after any of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.most = 0
        self._step = engine.step
        engine.step = self._watched  # type: ignore[method-assign]

    def _watched(self) -> list[Output]:
        outputs = self._step()
        self.engine.check_integrity()
        assert self.engine.pages_in_use <= self.engine.pages_total
        self.most = max(self.most, self.engine.pages_in_use)
        return outputs


@pytest.mark.parametrize("max_batch_tokens", [8, 16, 33])
def test_a_prompt_longer_than_the_cache_is_served_chunk_by_chunk(
    folder: Path, oracle: Any, attention: str, max_batch_tokens: int
) -> None:
    engine = load_engine(
        folder, attention=attention, num_pages=18, max_batch_tokens=max_batch_tokens
    )
    watched = Watched(engine)
    text = prompt(200)
    found = rows(run(engine, Work("a", 0, text, TREE)))
    torch.testing.assert_close(found, expected_rows(oracle, text, TREE), **CLOSE)
    assert watched.most <= most_pages(max_batch_tokens + len(TREE))
    assert engine.cached_len("a") == 200
    engine.release("a")
    assert engine.pages_in_use == 0


@pytest.mark.parametrize("drafts", [False, True])
def test_long_texts_hold_the_pages_of_their_window(
    folder: Path, oracle: Any, attention: str, drafts: bool
) -> None:
    prompts = {"a": prompt(9)}
    texts = {"a": generate(oracle, prompts["a"], 150)}
    engine = load_engine(folder, attention=attention, num_pages=12, max_batch_tokens=16)
    watched = Watched(engine)
    generator = np.random.default_rng(3) if drafts else None
    decoder = GreedyDecoder(engine, prompts, 150, generator, texts)
    assert decoder.run() == texts
    assert decoder.num_misses == 0
    # Before it retains a path, a sequence holds its tree's slots as well.
    assert watched.most <= most_pages(1 + (7 if drafts else 0))


def test_retained_paths_serve_later_rows(folder: Path, oracle: Any, attention: str) -> None:
    engine = load_engine(folder, attention=attention, num_pages=12, max_batch_tokens=16)
    context = prompt(30)
    run(engine, Work("a", 0, context, TREE))
    for turn in range(12):
        engine.retain("a", [0, 2], [])
        context = np.concatenate((context, TREE.token_ids[[0, 2]], token_array([20 + turn])))
        work = Work("a", len(context) - 1, context[-1:], TREE)
        found = rows(run(engine, work))
        torch.testing.assert_close(found, expected_rows(oracle, context, TREE), **CLOSE)
        engine.check_integrity()


def test_a_live_tree_grows_on_behind_released_pages(folder: Path, oracle: Any) -> None:
    engine = load_engine(folder, num_pages=12, max_batch_tokens=16)
    context = prompt(41)
    run(engine, Work("a", 0, context, TREE))
    engine.retain("a", [0], [1, 2])
    context = np.append(context, TREE.token_ids[0])
    grown = TokenTree.of([6, 7, 9, 10], [-1, -1, 0, 2])
    found = rows(run(engine, Work("a", 42, token_array([]), grown, num_cached_nodes=2)))
    expected = expected_rows(oracle, context, grown, first_node=2)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_rollback_to_before_the_window_asks_for_the_text_again(
    folder: Path, oracle: Any, attention: str
) -> None:
    engine = load_engine(folder, attention=attention)
    text = prompt(60)
    run(engine, Work("a", 0, text))
    changed = np.concatenate((text[:30], prompt(5, seed=1)))
    work = Work("a", 30, changed[30:], TREE, prefix_hash=prefix_hash(text[:30]))
    assert run(engine, work).have_len == 0
    engine.check_integrity()
    found = rows(run(engine, Work("a", 0, changed, TREE)))
    torch.testing.assert_close(found, expected_rows(oracle, changed, TREE), **CLOSE)
    assert engine.context_ids("a").tolist() == changed.tolist()


def test_lost_nodes_on_released_pages_ask_for_the_text_again(folder: Path) -> None:
    engine = load_engine(folder)
    run(engine, Work("a", 0, prompt(60), TREE))
    work = Work("a", 20, token_array([]), TREE, num_cached_nodes=2)
    assert run(engine, work).have_len == 0
    assert rows(run(engine, Work("a", 0, prompt(20), TREE))).shape[0] == 5


def test_a_short_rollback_keeps_the_cache(folder: Path, oracle: Any) -> None:
    engine = load_engine(folder)
    text = prompt(60)
    run(engine, Work("a", 0, text))
    changed = np.append(text[:57], np.int32(9))
    found = rows(run(engine, Work("a", 57, changed[57:])))
    assert engine.last_step.num_rows == 1
    torch.testing.assert_close(found[0], last_logits(oracle, changed), **CLOSE)


def test_a_text_sent_again_from_its_start_may_differ_anywhere(folder: Path, oracle: Any) -> None:
    engine = load_engine(folder, prefix_cache=False)
    run(engine, Work("a", 0, prompt(60)))
    changed = np.concatenate((prompt(20), prompt(9, seed=1)))
    found = rows(run(engine, Work("a", 0, changed)))
    torch.testing.assert_close(found[0], last_logits(oracle, changed), **CLOSE)
    engine.check_integrity()


def _prompts() -> Iterator[tuple[str, TokenArray]]:
    for index in range(6):
        yield f"r{index}", prompt(5 + 13 * index, seed=index)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_requests_still_finish_their_texts(
    folder: Path, oracle: Any, attention: str, prefix_cache: bool
) -> None:
    prompts = dict(_prompts())
    texts = {name: generate(oracle, ids, 40) for name, ids in prompts.items()}
    engine = load_engine(
        folder, attention=attention, num_pages=17, max_batch_tokens=16, prefix_cache=prefix_cache
    )
    decoder = GreedyDecoder(engine, prompts, 40, np.random.default_rng(2), texts)
    assert decoder.run() == texts
    assert decoder.num_misses > 0
    assert engine.pages_in_use == 0


@pytest.mark.parametrize("num_pages", [256, 14])
def test_a_prefix_hit_needs_the_pages_of_the_last_window_only(
    folder: Path, oracle: Any, attention: str, num_pages: int
) -> None:
    """The small cache has long evicted the pages of the text's beginning."""
    engine = load_engine(folder, attention=attention, num_pages=num_pages, max_batch_tokens=16)
    text = prompt(100)
    run(engine, Work("first", 0, text))
    engine.release("first")
    longer = np.concatenate((text, prompt(7, seed=1)))
    found = rows(run(engine, Work("second", 0, longer, TREE)))
    assert engine.last_step.num_prefix_hit_tokens == 100
    torch.testing.assert_close(found, expected_rows(oracle, longer, TREE), **CLOSE)
    assert engine.pages_in_use <= most_pages(7 + len(TREE))
    engine.check_integrity()


def test_a_text_behind_a_prefix_hit_may_end_anywhere_in_it(folder: Path, oracle: Any) -> None:
    engine = load_engine(folder, max_batch_tokens=16)
    text = prompt(100)
    run(engine, Work("first", 0, text))
    for length in (99, 80, 61, 12, 3):
        changed = np.concatenate((text[:length], prompt(4, seed=length)))
        found = rows(run(engine, Work("second", 0, changed)))
        torch.testing.assert_close(found[0], last_logits(oracle, changed), **CLOSE)
        engine.check_integrity()


def test_what_the_window_itself_does_not_fit_is_refused(folder: Path) -> None:
    engine = load_engine(folder, num_pages=14, max_batch_tokens=64)
    assert run(engine, Work("a", 0, prompt(57))).error is not None
    assert engine.longest_context == 56
    roomy = load_engine(folder, num_pages=64, max_batch_tokens=64)
    assert roomy.longest_context == roomy.max_context_len > 64 * PAGE_SIZE


@pytest.mark.parametrize("num_pages", range(6, 15))
def test_what_is_not_refused_finds_its_pages(folder: Path, num_pages: int) -> None:
    """Chunks, a tree and a rollback into a shared page, in caches around the least size."""
    engine = load_engine(folder, num_pages=num_pages, max_batch_tokens=16)
    fits = num_pages >= most_pages(16 + len(TREE)) + 1
    for length in (60, 47):
        text = np.concatenate((prompt(46), prompt(length - 46, seed=length)))
        output = run(engine, Work("a", 0, text, TREE))
        assert (output.error is None) == (fits or length + len(TREE) <= num_pages * PAGE_SIZE)
        again = Work("a", length - 3, text[length - 3 : -1], TREE)
        if output.error is None:
            assert rows(run(engine, again)).shape[0] == 5
        engine.check_integrity()


def test_pages_are_derived_from_the_window_instead_of_the_context(folder: Path) -> None:
    engine = load_engine(folder, num_pages=0, max_running_sequences=3, max_batch_tokens=8)
    assert engine.max_context_len == 512
    # A step's rows, and a tree as wide, are one sequence's or spread over all.
    assert engine.pages_total == most_pages(16) + 1 + 2 * (most_pages(16 // 3) + 1)
