"""Chunks, prefix hits, rollbacks and retained nodes change no row of logits, in every cache.

Where layers have a window, they hold the pages of the window and no others."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cluster.core import TokenTree, token_array
from cluster.engine.cpu import kernels
from cluster.engine.work import Work
from cluster.spec.token_log import prefix_hash
from tests.support.architectures import SLIDING_WINDOW
from tests.support.choices import by_day
from tests.support.engine.checked import Checked
from tests.support.engine.driver import (
    PAGE_SIZE,
    TREE,
    Factory,
    check_text,
    last_logits,
    most_pages,
    num_cached,
    prompt,
    random_tree,
    rows,
    some_commit,
)
from tests.support.engine.integrity import check_integrity

Make = partial[Checked]
# Each layer has a window, some have, some are convolutions and keep states; by night also no layer
# has one, and some are convolutions alone.
CACHES = [("mistral-sliding", "sdpa"), ("gemma3", "native"), ("qwen3.5", "native")]
OTHERS = [
    ("llama", "native"),
    ("lfm2", "native"),
    ("mistral-sliding", "native"),
    ("gemma3", "sdpa"),
    ("lfm3", "sdpa"),
    ("gpt-oss", "native"),
]


@pytest.fixture(params=by_day(CACHES, [*CACHES, *OTHERS]), ids="-".join)
def make(request: pytest.FixtureRequest, checkpoint_factory: Factory) -> Make:
    architecture, attention = request.param
    if attention == "native" and kernels.load() is None:
        pytest.skip("needs a C++ compiler")
    return partial(Checked, checkpoint_factory(architecture), attention=attention)


@pytest.fixture
def cached(make: Make) -> Checked:
    return make()


@pytest.fixture
def plain(llama_folder: Path) -> Checked:
    """For what is the same in every cache."""
    return Checked(llama_folder)


def joined(*parts: object) -> np.ndarray:
    return np.concatenate([token_array(part) for part in parts])


def check_most(cached: Checked, num_rows: int, length: int) -> None:
    """A sequence of that length held at most its windows' pages, with so many rows in a step."""
    for window, most in zip(cached.windows, cached.most, strict=True):
        if window is None:
            assert most >= -(-length // PAGE_SIZE)
        else:
            assert most <= most_pages(num_rows)


def test_long_texts_hold_the_pages_of_their_windows(make: Make):
    for generator in (None, np.random.default_rng(3)):
        cached = make(max_batch_tokens=16)
        assert check_text(cached.engine, cached.oracle, prompt(9), 90, generator).num_misses == 0
        # Before it retains a path, a sequence holds its tree's slots as well.
        check_most(cached, 1 + (7 if generator else 0), 98)
        assert not any(cached.held)


def test_a_prefix_hit_saves_rows_and_changes_nothing(cached: Checked):
    shared, tree = prompt(30, seed=1), TokenTree.of([5, 6, 7], [-1, 0, -1])
    cached.run("first", 0, joined(shared, prompt(9, seed=2)))
    cached.run("second", 0, joined(shared, prompt(7, seed=3)), tree)
    # Seven pages of four tokens are common; states are kept where chunks ended.
    hits = 0 if cached.engine.cache.states else 28
    assert cached.engine.last_step.num_prefix_hit_tokens == hits
    assert cached.engine.last_step.num_rows == 37 - hits + 3


def test_a_prefix_hit_needs_the_pages_of_the_last_window_only(make: Make):
    """Also where the cache has long evicted those of the text's beginning."""
    for num_pages in (256, 14):
        cached = make(max_batch_tokens=16)
        if None not in cached.windows:
            cached = make(max_batch_tokens=16, num_pages=num_pages)
        cached.run("first", 0, prompt(100))
        cached.engine.release("first")
        cached.run("second", 0, joined(prompt(100), prompt(7, seed=1)), TREE)
        hits = 96 if cached.engine.cache.states else 100
        assert cached.engine.last_step.num_prefix_hit_tokens == hits
        for window, held in zip(cached.windows, cached.held, strict=True):
            assert held == 28 if window is None else held <= most_pages(7 + len(TREE))


def test_a_text_behind_a_prefix_hit_may_end_anywhere_in_it(make: Make):
    cached = make(max_batch_tokens=16)
    cached.run("first", 0, prompt(100))
    for length in (99, 80, 61, 12, 3):
        cached.run("second", 0, joined(prompt(length + 1)[:length], prompt(4, seed=length)))


def test_another_tenant_finds_no_prefix_and_gets_the_same_rows(plain: Checked):
    plain.run("first", 0, prompt(24), tenant=b"a")
    for tenant in (b"", b"b", b"a"):
        plain.run(f"of {tenant!r}", 0, prompt(24), tenant=tenant)
        assert plain.engine.last_step.num_prefix_hit_tokens == (20 if tenant == b"a" else 0)


def test_a_request_that_opens_again_for_another_tenant_keeps_nothing(plain: Checked):
    plain.run("a", 0, prompt(24), tenant=b"a")
    plain.run("a", 0, prompt(24), tenant=b"b")
    assert plain.engine.last_step.num_rows == 24
    plain.run("other", 0, prompt(24), tenant=b"b")
    assert plain.engine.last_step.num_prefix_hit_tokens == 20


def test_samples_of_one_prompt_share_its_pages_and_part_ways(cached: Checked):
    names = [f"sample-{index}" for index in range(4)]
    for name in names:
        cached.engine.submit(Work(name, 0, prompt(42)))
    while cached.engine.has_pending:
        for output in cached.engine.step():
            cached.close(rows(output)[0], last_logits(cached.oracle, prompt(42)))
    # Ten full pages once, less those that have left the window, and each sample's own last one.
    left = {None: 0, SLIDING_WINDOW: 6, PAGE_SIZE: 8}
    assert cached.held == [4 + 10 - left[window] for window in cached.windows]
    for index, name in enumerate(names):
        cached.run(name, 41, joined(prompt(42)[:41], prompt(4, seed=index)))


def test_committed_drafts_enter_the_prefix_cache_and_live_nodes_do_not(cached: Checked):
    drafts = [5, 6, 7, 8, 9, 10]
    cached.run("a", 0, prompt(8), TokenTree.chain(drafts))
    cached.engine.retain("a", [0, 1, 2, 3], [4])
    cached.engine.release("a")
    assert num_cached(cached.engine) == 3 * len(cached.held)
    cached.run("b", 0, joined(prompt(8), drafts, [11]))
    hits = 4 if cached.engine.cache.states else 12
    assert cached.engine.last_step.num_prefix_hit_tokens == hits


def test_a_rollback_to_before_the_window_asks_for_the_text_again(cached: Checked):
    text, has_windows = prompt(60), any(cached.windows)
    cached.run("a", 0, text)
    cached.run("a", 56, joined(text[:56], [9]))
    assert cached.engine.last_step.num_rows == 1
    changed = joined(text[:28], prompt(5, seed=1))
    output = cached.run("a", 28, changed, TREE, prefix_hash=prefix_hash(text[:28]))
    if has_windows:
        assert output.have_len == 0
        assert not any(cached.held)
        cached.run("a", 0, changed, TREE)
    assert cached.engine.context_ids("a").tolist() == changed.tolist()
    cached.run("a", 0, text, TREE)
    output = cached.run("a", 20, text[:20], TREE, num_cached_nodes=2)
    assert output.have_len == (0 if has_windows else 20), "the nodes are lost"
    cached.run("a", 0, text[:20], TREE)


def test_a_text_sent_again_from_its_start_may_differ_anywhere(make: Make):
    cached = make(prefix_cache=False)
    cached.run("a", 0, prompt(60))
    cached.run("a", 0, joined(prompt(20), prompt(9, seed=1)))


def test_a_rollback_into_a_shared_page_leaves_the_other_sharer_alone(cached: Checked):
    text = prompt(44)
    for name in "ab":
        cached.run(name, 0, text)
    # Takes the page that "b" computed and gave up for that of "a": its next one lies elsewhere.
    cached.run("c", 0, prompt(9, seed=8))
    tables = [cached.engine.page_owners.sequences[name].tables for name in "ab"]
    assert all(own.pages[10] == other.pages[10] for own, other in zip(*tables, strict=True))
    changed = joined(text[:42], prompt(3, seed=6))
    assert cached.run("b", 42, changed, TREE).have_len == 40  # where the page begins
    cached.run("b", 40, changed, TREE)
    assert all(own.pages[10] != other.pages[10] for own, other in zip(*tables, strict=True))
    cached.run("a", 44, joined(text, prompt(1, seed=7)), TREE)


def test_tokens_resent_although_cached_are_not_computed_again(plain: Checked):
    plain.run("a", 0, prompt(30))
    plain.run("a", 10, prompt(30))
    assert plain.engine.last_step.num_rows == 1


def test_a_shortage_is_answered_with_what_is_held(plain: Checked):
    assert plain.run("a", 5, prompt(8)).have_len == 0
    plain.run("a", 0, prompt(10))
    assert plain.run("a", 12, prompt(15)).have_len == 10
    assert plain.engine.cached_len("a") == 10


def test_lost_nodes_are_answered_with_the_whole_context(plain: Checked):
    text, tree = prompt(10), TokenTree.of([5, 6], [-1, 0])
    plain.run("a", 0, text)
    assert plain.run("a", 10, text, tree, num_cached_nodes=1).have_len == 10
    plain.run("a", 10, text, TokenTree.of([7], [-1]))
    # Other nodes than these.
    assert plain.run("a", 10, text, tree, num_cached_nodes=1).have_len == 10
    plain.run("a", 10, text, tree)


def test_retained_paths_of_random_trees_serve_later_rows(make: Make):
    """Twenty rounds of commit and survival in one sequence, of which pages are released.

    A text before it gives its pages other numbers in each kind of layer, so that a path that reads
    the other kind's table reads other rows."""
    cached = make(max_batch_tokens=16, prefix_cache=False)
    cached.run("apart", 0, prompt(41, seed=9))
    generator = np.random.default_rng(7)
    context, tree = prompt(41), TokenTree.of([], [])
    cached.run("a", 0, context)
    for _ in range(20):
        extra = random_tree(int(generator.integers(1, 6)), generator)
        parents = generator.integers(-1, len(tree), len(extra)) if len(tree) else extra.parents
        grown = TokenTree.of([*tree.token_ids, *extra.token_ids], [*tree.parents, *parents])
        cached.run("a", len(context), context, grown, num_cached_nodes=len(tree))
        path, survivors = some_commit(
            grown, lambda share: generator.random() < share, generator.choice
        )
        cached.engine.retain("a", path, survivors)
        context = joined(context, grown.token_ids[path])
        new = {node: index for index, node in enumerate(survivors)}
        tree = TokenTree.of(
            grown.token_ids[survivors], [new.get(grown.parents[node], -1) for node in survivors]
        )
        check_integrity(cached.engine)
    tables = cached.engine.page_owners.sequences["a"].tables
    for window, table in zip(cached.windows, tables, strict=True):
        assert (table.num_released > 0) == (window is not None)
    if len(tables) > 1:
        assert set(zip(*(table.pages for table in tables), strict=True)).isdisjoint(
            (page, page) for page in tables[0].pages
        )
