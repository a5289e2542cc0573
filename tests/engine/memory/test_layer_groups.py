"""Models with windows and full attention: each kind of layer holds the pages it still reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.core import TokenTree, token_array
from cluster.engine.cpu import kernels
from cluster.engine.engine import Engine, Output, Work
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
native = pytest.mark.skipif(kernels.load() is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module", params=["sdpa", pytest.param("native", marks=native)])
def attention(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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
    return tuple(pool.num_held for pool in engine._residency.pools)


def pages(engine: Engine) -> tuple[int, ...]:
    return tuple(pool.num_pages for pool in engine._residency.pools)


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


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_preempted_requests_still_finish_their_texts(
    folder: Path, oracle: Any, attention: str, prefix_cache: bool, drafts: bool
) -> None:
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


@native
def test_native_layers_with_windows_and_without_read_their_own_pages(
    checkpoint_factory: Callable[..., Path],
) -> None:
    """A model of the native layers' classes; one native call for all of them reads one table."""
    folder = checkpoint_factory(
        "qwen2", use_sliding_window=True, sliding_window=SLIDING_WINDOW, max_window_layers=1
    )
    oracle, engine = load_oracle(folder), load_engine(folder, max_batch_tokens=16)
    assert [layer.window for layer in engine.layers] == [None, SLIDING_WINDOW, SLIDING_WINDOW]
    assert engine.model.native is None
    assert engine.grower is None
    texts = {"a": generate(oracle, prompt(43), 60)}
    decoder = GreedyDecoder(engine, {"a": prompt(43)}, 60, np.random.default_rng(3), texts)
    assert decoder.run() == texts
