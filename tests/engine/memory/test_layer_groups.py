"""Models with windows and full attention: each kind of layer holds the pages it still reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.core import TokenTree, token_array
from cluster.engine.cpu import kernels
from cluster.engine.engine import Engine, Output, Work
from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.memory.reach import layer_groups
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

# With random experts float32 rounding was seen to reach 3.4e-5.
CLOSE = {"atol": 5e-5, "rtol": 5e-5}
PAGE_SIZE = 4
FULL, WINDOWED = 0, 1
TREE = TokenTree.of([5, 6, 7, 8], [-1, 0, 0, -1])


@pytest.fixture(scope="module", params=["gemma3", "gpt-oss"])
def folder(request: pytest.FixtureRequest, checkpoint_factory: Callable[..., Path]) -> Path:
    """Layers with a window, with full attention, with a window."""
    return checkpoint_factory(request.param)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return load_oracle(folder)


def most_pages(num_rows: int) -> int:
    """Of one sequence in layers with a window, where so many rows are written in a step."""
    return -(-(SLIDING_WINDOW + num_rows) // PAGE_SIZE) + 2


def held(engine: Engine) -> tuple[int, ...]:
    return tuple(pool.num_held for pool in engine.page_owners.pools)


def pages(engine: Engine) -> tuple[int, ...]:
    return tuple(pool.num_pages for pool in engine.page_owners.pools)


def watch(engine: Engine) -> list[tuple[int, ...]]:
    """What is held after each step to come."""
    seen: list[tuple[int, ...]] = []
    step = engine.step

    def watched() -> list[Output]:
        outputs = step()
        engine.check_integrity()
        seen.append(held(engine))
        return outputs

    engine.step = watched  # type: ignore[method-assign]
    return seen


def set_apart(engine: Engine) -> None:
    """Without a prefix cache, texts that follow have pages of other numbers in each kind, so that a
    path that reads the other kind's table reads other rows.  In new pools the numbers are alike."""
    run(engine, Work("apart", 0, prompt(41, seed=9)))


def num_bytes(cache: KVCache) -> int:
    return sum(kv.nbytes for kv in cache.layers)


@pytest.mark.parametrize("drafts", [False, True])
def test_layers_with_a_window_hold_its_pages_while_the_others_hold_the_text(
    folder: Path, oracle: Any, attention: str, drafts: bool
) -> None:
    texts = {"a": generate(oracle, prompt(9), 150)}
    engine = load_engine(folder, attention=attention, max_batch_tokens=16)
    seen = watch(engine)
    generator = np.random.default_rng(3) if drafts else None
    decoder = GreedyDecoder(engine, {"a": prompt(9)}, 150, generator, texts)
    assert decoder.run() == texts
    assert max(each[FULL] for each in seen) >= -(-158 // PAGE_SIZE)
    # Before it retains a path, a sequence holds its tree's slots as well.
    assert max(each[WINDOWED] for each in seen) <= most_pages(1 + (7 if drafts else 0))
    assert held(engine) == (0, 0)


@pytest.mark.parametrize("max_batch_tokens", [8, 33])
def test_a_long_prompt_is_served_chunk_by_chunk(
    folder: Path, oracle: Any, attention: str, max_batch_tokens: int
) -> None:
    engine = load_engine(folder, attention=attention, max_batch_tokens=max_batch_tokens)
    seen = watch(engine)
    text = prompt(200)
    found = rows(run(engine, Work("a", 0, text, TREE)))
    torch.testing.assert_close(found, expected_rows(oracle, text, TREE), **CLOSE)
    assert max(each[WINDOWED] for each in seen) <= most_pages(max_batch_tokens + len(TREE))
    assert seen[-1][FULL] == 51


@pytest.mark.parametrize("drafts", [False, True])
def test_preempted_requests_still_finish_their_texts(
    folder: Path, oracle: Any, attention: str, drafts: bool
) -> None:
    prefix_cache = drafts == (attention == "native")  # of three choices, every pair
    prompts = {f"r{index}": prompt(5 + 13 * index, seed=index) for index in range(6)}
    texts = {name: generate(oracle, ids, 40) for name, ids in prompts.items()}
    engine = load_engine(
        folder, attention=attention, num_pages=34, max_batch_tokens=16, max_context_len=140,
        max_running_sequences=4, prefix_cache=prefix_cache,
    )  # fmt: skip
    watch(engine)
    generator = np.random.default_rng(2) if drafts else None
    decoder = GreedyDecoder(engine, prompts, 40, generator, texts)
    assert decoder.run() == texts
    assert decoder.num_misses > 0
    assert held(engine) == (0, 0)


def test_a_prefix_hit_needs_the_pages_of_the_last_window_only(
    folder: Path, oracle: Any, attention: str
) -> None:
    """Of the layers with a window it holds no others, of the rest all."""
    engine = load_engine(folder, attention=attention, max_batch_tokens=16)
    text = prompt(100)
    run(engine, Work("first", 0, text))
    engine.release("first")
    longer = np.concatenate((text, prompt(7, seed=1)))
    found = rows(run(engine, Work("second", 0, longer, TREE)))
    assert engine.last_step.num_prefix_hit_tokens == 100
    torch.testing.assert_close(found, expected_rows(oracle, longer, TREE), **CLOSE)
    assert held(engine)[FULL] == 28
    assert held(engine)[WINDOWED] <= most_pages(7 + len(TREE))
    engine.check_integrity()


def test_a_hit_whose_window_is_gone_is_shortened_to_where_it_is_there(
    folder: Path, oracle: Any
) -> None:
    engine = load_engine(
        folder, num_pages=20, max_batch_tokens=8, max_running_sequences=1, max_context_len=160
    )
    text = prompt(100)
    run(engine, Work("first", 0, text))
    engine.release("first")
    # Of the few pages of the windows those of the text's beginning were taken for its end.
    assert pages(engine) == (40, 10)
    for length, num_hits in ((98, 96), (60, 0)):
        changed = np.concatenate((text[:length], prompt(2, seed=length)))
        found = rows(run(engine, Work("second", 0, changed)))
        hits = engine.last_step.num_prefix_hit_tokens
        torch.testing.assert_close(found[0], last_logits(oracle, changed), **CLOSE)
        assert hits == num_hits
        engine.check_integrity()
        engine.release("second")


def test_samples_of_one_prompt_share_its_pages_and_part_ways(folder: Path, oracle: Any) -> None:
    engine = load_engine(folder)
    names = [f"sample-{index}" for index in range(4)]
    for name in names:
        engine.submit(Work(name, 0, prompt(42)))
    while engine.has_pending:
        engine.step()
    # Ten full pages once, of which windows may have left six, and each sample's own last one.
    assert held(engine) == (10 + 4, 4 + 4)
    for index, name in enumerate(names):
        changed = np.concatenate((prompt(41), prompt(4, seed=index)))
        found = rows(run(engine, Work(name, 41, changed[41:])))
        torch.testing.assert_close(found[0], last_logits(oracle, changed), **CLOSE)
        engine.check_integrity()


def test_retained_paths_serve_later_rows(folder: Path, oracle: Any, attention: str) -> None:
    engine = load_engine(folder, attention=attention, max_batch_tokens=16)
    context = prompt(30)
    run(engine, Work("a", 0, context, TREE))
    for turn in range(12):
        engine.retain("a", [0, 2], [])
        context = np.concatenate((context, TREE.token_ids[[0, 2]], token_array([20 + turn])))
        found = rows(run(engine, Work("a", len(context) - 1, context[-1:], TREE)))
        torch.testing.assert_close(found, expected_rows(oracle, context, TREE), **CLOSE)
        engine.check_integrity()


def test_a_rollback_to_before_the_window_asks_for_the_text_again(folder: Path, oracle: Any) -> None:
    engine = load_engine(folder)
    text = prompt(60)
    run(engine, Work("a", 0, text))
    changed = np.concatenate((text[:57], prompt(5, seed=1)))
    assert rows(run(engine, Work("a", 57, changed[57:]))).shape[0] == 1
    changed = np.concatenate((text[:30], prompt(5, seed=1)))
    assert run(engine, Work("a", 30, changed[30:], TREE)).have_len == 0
    assert held(engine) == (0, 0)
    found = rows(run(engine, Work("a", 0, changed, TREE)))
    torch.testing.assert_close(found, expected_rows(oracle, changed, TREE), **CLOSE)


def test_memory_that_windows_leave_serves_a_text_that_one_kind_of_layer_could_not_hold(
    folder: Path, oracle: Any, attention: str
) -> None:
    """The same bytes; its prompt alone is longer than the share of the layers with a window."""
    settings = {"num_pages": 20, "max_batch_tokens": 8, "max_running_sequences": 1}
    engine = load_engine(folder, attention=attention, max_context_len=160, **settings)
    one_kind = [replace(layer, window=None) for layer in engine.layers]
    assert len(layer_groups(one_kind, PAGE_SIZE)) == 1
    alike = KVCache(one_kind, (20,), PAGE_SIZE)
    own, other = (num_bytes(cache) for cache in (engine.cache, alike))
    scratch = num_bytes(KVCache(one_kind, (0,), PAGE_SIZE))
    assert own <= other
    assert other == 21 * scratch
    assert pages(engine) == (40, 10)
    text = prompt(90)
    assert len(text) > 20 * PAGE_SIZE > pages(engine)[WINDOWED] * PAGE_SIZE
    texts = {"a": generate(oracle, text, 60)}
    decoder = GreedyDecoder(engine, {"a": text}, 60, np.random.default_rng(4), texts)
    assert decoder.run() == texts
    assert decoder.num_misses == 0


def test_a_live_tree_grows_on_behind_released_pages(
    folder: Path, oracle: Any, attention: str
) -> None:
    engine = load_engine(folder, attention=attention, max_batch_tokens=16, prefix_cache=False)
    set_apart(engine)
    run(engine, Work("a", 0, prompt(41), TREE))
    engine.retain("a", [0], [1, 2])
    context = np.append(prompt(41), TREE.token_ids[0])
    grown = TokenTree.of([6, 7, 9, 10], [-1, -1, 0, 2])
    found = rows(run(engine, Work("a", 42, token_array([]), grown, num_cached_nodes=2)))
    expected = expected_rows(oracle, context, grown, first_node=2)
    torch.testing.assert_close(found, expected, **CLOSE)
    full, windowed = engine.page_owners.sequences["a"].tables
    assert windowed.num_released > 0 == full.num_released
    assert all(own != other for own, other in zip(full.pages, windowed.pages, strict=True))


def test_a_rollback_into_a_shared_page_copies_it_in_both_kinds(
    folder: Path, oracle: Any, attention: str
) -> None:
    engine = load_engine(folder, attention=attention, max_batch_tokens=64)
    text = prompt(44)
    for name in "ab":
        run(engine, Work(name, 0, text))
    # Takes the page that "b" computed and gave up for that of "a": a copy is to go elsewhere.
    run(engine, Work("c", 0, prompt(9, seed=8)))
    changed = np.concatenate((text[:42], prompt(3, seed=6)))
    tables = [engine.page_owners.sequences[name].tables for name in "ab"]
    assert all(own.pages[10] == other.pages[10] for own, other in zip(*tables, strict=True))
    found = rows(run(engine, Work("b", 42, changed[42:], TREE)))
    torch.testing.assert_close(found, expected_rows(oracle, changed, TREE), **CLOSE)
    assert all(own.pages[10] != other.pages[10] for own, other in zip(*tables, strict=True))
    more = prompt(1, seed=7)
    found = rows(run(engine, Work("a", 44, more, TREE)))
    expected = expected_rows(oracle, np.concatenate((text, more)), TREE)
    torch.testing.assert_close(found, expected, **CLOSE)
    engine.check_integrity()


@pytest.mark.skipif(kernels.load() is None, reason="there is no C++ compiler")
def test_native_layers_with_windows_and_without_read_their_own_pages(
    checkpoint_factory: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A model of the native layers' classes; one native call for all of them reads one table, so
    its forward is left to a path that knows both, and the log says so."""
    caplog.set_level("INFO", logger="cluster.engine.cpu.causal_lm")
    folder = checkpoint_factory(
        "qwen2", use_sliding_window=True, sliding_window=SLIDING_WINDOW, max_window_layers=1
    )
    oracle = load_oracle(folder)
    engine = load_engine(folder, max_batch_tokens=16, prefix_cache=False)
    set_apart(engine)
    assert [layer.window for layer in engine.layers] == [None, SLIDING_WINDOW, SLIDING_WINDOW]
    assert engine.model.native is None
    assert "layers with a window have page tables of their own" in caplog.text
    assert engine.grower is None
    texts = {"a": generate(oracle, prompt(43), 60)}
    decoder = GreedyDecoder(engine, {"a": prompt(43)}, 60, np.random.default_rng(3), texts)
    assert decoder.run() == texts
