"""What windows leave of the memory: which texts fit, and which pages they are given."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.engine.memory.kv_cache import KVCache, layer_groups
from cluster.engine.work import Work
from tests.support.architectures import SLIDING_WINDOW
from tests.support.choices import by_day
from tests.support.engine.checked import Checked
from tests.support.engine.driver import (
    PAGE_SIZE,
    TREE,
    Factory,
    check_text,
    load_engine,
    most_pages,
    prompt,
    rows,
    run,
)
from tests.support.engine.integrity import check_integrity
from tests.support.engine.native import needs_native


@pytest.fixture(scope="module")
def folder(checkpoint_factory: Factory) -> Path:
    """Each layer has a window."""
    return checkpoint_factory("mistral-sliding")


@pytest.fixture(scope="module", params=by_day(["gemma3"], ["gemma3", "gpt-oss"]))
def mixed(request: pytest.FixtureRequest, checkpoint_factory: Factory) -> Path:
    """Layers with a window, with full attention, with a window."""
    return checkpoint_factory(request.param)


def roomy(folder: Path) -> Checked:
    """An engine whose windows leave memory to its layers without one."""
    return Checked(
        folder, num_pages=20, max_batch_tokens=8, max_running_sequences=1, max_context_len=160
    )


def test_what_the_window_itself_does_not_fit_is_refused(folder: Path):
    engine = load_engine(folder, num_pages=14)
    assert run(engine, Work("a", 0, prompt(57))).error is not None
    assert engine.longest_context == 56
    other = load_engine(folder, num_pages=64)
    assert other.longest_context == other.max_context_len > 64 * PAGE_SIZE


@pytest.mark.parametrize("num_pages", by_day((6, 10, 11), range(6, 15)))
def test_what_is_not_refused_finds_its_pages(folder: Path, num_pages: int):
    """Chunks, a tree and a rollback to a page's beginning, in caches around the least size."""
    engine = load_engine(folder, num_pages=num_pages, max_batch_tokens=16)
    fits = num_pages >= most_pages(16 + len(TREE)) + 1
    for length in (60, 47):
        text = np.concatenate((prompt(46), prompt(length - 46, seed=length)))
        output = run(engine, Work("a", 0, text, TREE))
        assert (output.error is None) == (fits or length + len(TREE) <= num_pages * PAGE_SIZE)
        start = (length - 3) // PAGE_SIZE * PAGE_SIZE
        again = Work("a", start, text[start:-1], TREE)
        if output.error is None:
            assert rows(run(engine, again)).shape[0] == 5
        check_integrity(engine)


def test_pages_are_derived_from_the_window_instead_of_the_context(folder: Path):
    engine = load_engine(folder, num_pages=0, max_running_sequences=3, max_batch_tokens=8)
    assert engine.max_context_len == 512
    # A step's rows, and a tree as wide, are one sequence's or spread over all.
    assert engine.pages_total == most_pages(16) + 1 + 2 * (most_pages(16 // 3) + 1)


def test_a_hit_whose_window_is_gone_is_shortened_to_where_it_is_there(mixed: Path):
    cached = roomy(mixed)
    cached.run("first", 0, prompt(100))
    cached.engine.release("first")
    # Of the few pages of the windows those of the text's beginning were taken for its end.
    assert [pool.num_pages for pool in cached.engine.page_owners.pools] == [40, 10]
    for length, num_hits in ((98, 96), (60, 0)):
        cached.run("second", 0, np.concatenate((prompt(100)[:length], prompt(2, seed=length))))
        assert cached.engine.last_step.num_prefix_hit_tokens == num_hits
        cached.engine.release("second")


def test_memory_that_windows_leave_serves_a_text_that_one_kind_of_layer_could_not_hold(
    mixed: Path,
):
    """The same bytes; its prompt alone is longer than the share of the layers with a window."""
    cached = roomy(mixed)
    engine = cached.engine
    one_kind = [replace(layer, window=None) for layer in engine.layers]
    assert len(layer_groups(one_kind, PAGE_SIZE)) == 1
    alike, scratch = (KVCache(one_kind, (count,), PAGE_SIZE).num_bytes for count in (20, 0))
    assert engine.cache.num_bytes <= alike == 21 * scratch
    assert [pool.num_pages for pool in engine.page_owners.pools] == [40, 10]
    # Longer than 20 pages.
    decoder = check_text(engine, cached.oracle, prompt(90), 60, np.random.default_rng(4))
    assert decoder.num_misses == 0


@needs_native
def test_native_layers_with_windows_and_without_read_their_own_pages(
    checkpoint_factory: Factory, caplog: pytest.LogCaptureFixture
):
    """A model of the native layers' classes; one native call for all of them reads one table, so
    its forward is left to a path that knows both, and the log says so."""
    caplog.set_level("INFO", logger="cluster.engine.cpu.causal_lm")
    folder = checkpoint_factory(
        "qwen2", use_sliding_window=True, sliding_window=SLIDING_WINDOW, max_window_layers=1
    )
    cached = Checked(folder, max_batch_tokens=16, prefix_cache=False)
    cached.run("apart", 0, prompt(41, seed=9))
    engine = cached.engine
    assert [layer.window for layer in engine.layers] == [None, SLIDING_WINDOW, SLIDING_WINDOW]
    assert engine.model.native is None
    assert "layers with a window have page tables of their own" in caplog.text
    assert engine.grower is None
    check_text(engine, cached.oracle, prompt(43), 60, np.random.default_rng(3))
