"""Chunks, prefix hits, rollbacks and retained nodes change no row of logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.core import EMPTY_TOKENS, TokenTree
from cluster.engine.engine import Engine, Work
from cluster.errors import ProtocolError
from cluster.spec.token_log import prefix_hash
from tests.support.engine.driver import (
    expected_rows,
    last_logits,
    load_engine,
    load_oracle,
    num_cached,
    prompt,
    random_tree,
    rows,
    run,
    run_resending,
)

CLOSE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture(scope="module", params=["llama", "mistral-sliding"])
def folder(request: pytest.FixtureRequest, checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory(request.param)


@pytest.fixture
def engine(folder: Path) -> Engine:
    return load_engine(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> object:
    return load_oracle(folder)


@pytest.mark.parametrize("max_batch_tokens", [8, 16, 33])
def test_chunked_prefill_equals_one_forward(
    folder: Path, oracle: object, max_batch_tokens: int
) -> None:
    engine = load_engine(folder, max_batch_tokens=max_batch_tokens)
    tree = TokenTree.of([5, 6, 7], [-1, 0, -1])
    found = rows(run(engine, Work("a", 0, prompt(50), tree)))
    torch.testing.assert_close(found, expected_rows(oracle, prompt(50), tree), **CLOSE)
    assert engine.cached_len("a") == 50


def test_a_prefix_hit_saves_rows_and_changes_nothing(engine: Engine, oracle: object) -> None:
    shared = prompt(30, seed=1)
    first = np.concatenate((shared, prompt(9, seed=2)))
    second = np.concatenate((shared, prompt(7, seed=3)))
    run(engine, Work("first", 0, first))
    tree = TokenTree.of([5, 6, 7], [-1, 0, -1])
    found = rows(run(engine, Work("second", 0, second, tree)))
    # Seven pages of four tokens are common.
    assert engine.last_step.num_prefix_hit_tokens == 28
    assert engine.last_step.num_rows == len(second) - 28 + 3
    torch.testing.assert_close(found, expected_rows(oracle, second, tree), **CLOSE)


def test_another_tenant_finds_no_prefix_and_gets_the_same_rows(
    engine: Engine, oracle: object
) -> None:
    run(engine, Work("first", 0, prompt(24), tenant=b"a"))
    for tenant in (b"", b"b", b"a"):
        name = f"of {tenant!r}"
        found = rows(run(engine, Work(name, 0, prompt(24), tenant=tenant)))
        assert engine.last_step.num_prefix_hit_tokens == (20 if tenant == b"a" else 0)
        torch.testing.assert_close(found[0], last_logits(oracle, prompt(24)), **CLOSE)
    engine.check_integrity()


def test_a_request_that_opens_again_for_another_tenant_keeps_nothing(engine: Engine) -> None:
    run(engine, Work("a", 0, prompt(24), tenant=b"a"))
    run(engine, Work("a", 0, prompt(24), tenant=b"b"))
    assert engine.last_step.num_rows == 24
    run(engine, Work("other", 0, prompt(24), tenant=b"b"))
    assert engine.last_step.num_prefix_hit_tokens == 20
    engine.check_integrity()


def test_a_prefix_outlives_the_request_that_computed_it(engine: Engine, oracle: object) -> None:
    run(engine, Work("first", 0, prompt(24)))
    engine.release("first")
    assert engine.pages_in_use == 0
    assert num_cached(engine) == 6
    found = rows(run(engine, Work("second", 0, prompt(24))))
    # All six pages are there, but the row after the last token is asked for.
    assert engine.last_step.num_prefix_hit_tokens == 20
    torch.testing.assert_close(found[0], last_logits(oracle, prompt(24)), **CLOSE)


def test_without_the_prefix_cache_nothing_is_kept(folder: Path) -> None:
    engine = load_engine(folder, prefix_cache=False)
    run(engine, Work("first", 0, prompt(24)))
    engine.release("first")
    assert (engine.pages_in_use, num_cached(engine)) == (0, 0)
    run(engine, Work("second", 0, prompt(24)))
    assert engine.last_step.num_prefix_hit_tokens == 0


def test_samples_of_one_prompt_share_its_pages(engine: Engine, oracle: object) -> None:
    names = [f"sample-{index}" for index in range(4)]
    for name in names:
        engine.submit(Work(name, 0, prompt(42)))
    found = {}
    while engine.has_pending:
        found.update({output.request_id: rows(output) for output in engine.step()})
    for name in names:
        torch.testing.assert_close(found[name][0], last_logits(oracle, prompt(42)), **CLOSE)
    # Ten full pages once, of which six may have left the window, and each sample's own last one.
    num_released = 0 if engine.layers[0].window is None else 6
    assert engine.pages_in_use == 10 - num_released + 4


def test_committed_drafts_enter_the_prefix_cache_and_live_nodes_do_not(engine: Engine) -> None:
    context, tree = prompt(8), TokenTree.chain([5, 6, 7, 8, 9, 10])
    run(engine, Work("a", 0, context, tree))
    engine.retain("a", [0, 1, 2, 3], [4])
    engine.release("a")
    assert num_cached(engine) == 3
    longer = np.concatenate((context, np.array([5, 6, 7, 8, 9, 10, 11], np.int32)))
    run(engine, Work("b", 0, longer))
    assert engine.last_step.num_prefix_hit_tokens == 12


def test_rollback_continues_from_an_earlier_token(engine: Engine, oracle: object) -> None:
    run(engine, Work("a", 0, prompt(30, seed=1)))
    for base_len in (26, 13, 8, 0):
        context = np.concatenate((prompt(30, seed=1)[:base_len], prompt(5, seed=base_len)))
        found = rows(run_resending(engine, Work("a", base_len, context[base_len:])))
        torch.testing.assert_close(found[0], last_logits(oracle, context), **CLOSE)
        assert engine.context_ids("a").tolist() == context.tolist()
        run_resending(engine, Work("a", base_len, prompt(30, seed=1)[base_len:]))


def test_rollback_into_a_shared_page_leaves_the_other_sharer_alone(
    engine: Engine, oracle: object
) -> None:
    run(engine, Work("a", 0, prompt(16)))
    run(engine, Work("b", 0, np.append(prompt(16), np.int32(9))))
    assert engine.pages_in_use == 5
    changed = np.append(prompt(16)[:14], np.int32(77))
    found = rows(run_resending(engine, Work("b", 14, changed[14:])))
    torch.testing.assert_close(found[0], last_logits(oracle, changed), **CLOSE)
    longer = np.append(prompt(16), np.int32(10))
    found = rows(run(engine, Work("a", 16, longer[16:])))
    torch.testing.assert_close(found[0], last_logits(oracle, longer), **CLOSE)
    run(engine, Work("c", 0, longer))
    torch.testing.assert_close(
        rows(run(engine, Work("c", 16, longer[16:])))[0], last_logits(oracle, longer), **CLOSE
    )
    engine.check_integrity()


def test_tokens_resent_although_cached_are_not_computed_again(engine: Engine) -> None:
    run(engine, Work("a", 0, prompt(30)))
    run(engine, Work("a", 10, prompt(30)[10:]))
    assert engine.last_step.num_rows == 1


def test_a_shortage_is_answered_with_what_is_held(engine: Engine) -> None:
    assert run(engine, Work("a", 5, prompt(3))).have_len == 0
    run(engine, Work("a", 0, prompt(10)))
    assert run(engine, Work("a", 12, prompt(3))).have_len == 10
    assert engine.cached_len("a") == 10


def test_another_prefix_is_answered_with_zero(engine: Engine) -> None:
    run(engine, Work("a", 0, prompt(10)))
    right, wrong = prefix_hash(prompt(8)), prefix_hash(prompt(8, seed=1))
    assert run(engine, Work("a", 8, prompt(2), prefix_hash=wrong)).have_len == 0
    assert run(engine, Work("a", 8, prompt(2), prefix_hash=right)).logits is not None


def test_lost_nodes_are_answered_with_the_whole_context(engine: Engine) -> None:
    tree = TokenTree.of([5, 6], [-1, 0])
    run(engine, Work("a", 0, prompt(10)))
    work = Work("a", 10, EMPTY_TOKENS, tree, num_cached_nodes=1)
    assert run(engine, work).have_len == 10
    run(engine, Work("a", 10, EMPTY_TOKENS, TokenTree.of([7], [-1])))
    assert run(engine, work).have_len == 10  # other nodes than these
    assert rows(run(engine, Work("a", 10, EMPTY_TOKENS, tree))).shape[0] == 2


def test_fewer_cached_nodes_than_live_ones_drop_the_rest(engine: Engine, oracle: object) -> None:
    run(engine, Work("a", 0, prompt(10), TokenTree.of([5, 6, 7], [-1, 0, 0])))
    tree = TokenTree.of([5, 8], [-1, 0])
    found = rows(run(engine, Work("a", 10, EMPTY_TOKENS, tree, num_cached_nodes=1)))
    torch.testing.assert_close(
        found, expected_rows(oracle, prompt(10), tree, first_node=1), **CLOSE
    )


def test_retained_paths_of_random_trees_serve_later_rows(engine: Engine, oracle: object) -> None:
    """Twenty rounds of commit and survival in one sequence, each checked against the oracle."""
    generator = np.random.default_rng(7)
    context = prompt(6)
    run(engine, Work("a", 0, context))
    tree = TokenTree.of([], [])
    for _ in range(20):
        extra = random_tree(int(generator.integers(1, 6)), generator)
        parents = generator.integers(-1, len(tree), len(extra)) if len(tree) else extra.parents
        grown = TokenTree.of([*tree.token_ids, *extra.token_ids], [*tree.parents, *parents])
        work = Work("a", len(context), EMPTY_TOKENS, grown, num_cached_nodes=len(tree))
        found = rows(run(engine, work))
        expected = expected_rows(oracle, context, grown, first_node=len(tree))
        torch.testing.assert_close(found, expected[-len(extra) :], **CLOSE)
        path, survivors = _commit_somewhere(grown, generator)
        engine.retain("a", path, survivors)
        context = np.concatenate((context, grown.token_ids[path]))
        new = {node: index for index, node in enumerate(survivors)}
        tree = TokenTree.of(
            grown.token_ids[survivors], [new.get(grown.parents[node], -1) for node in survivors]
        )
        engine.check_integrity()


def _commit_somewhere(
    tree: TokenTree, generator: np.random.Generator
) -> tuple[list[int], list[int]]:
    """A random path and a random prefix-closed part of what hangs below its end."""
    path: list[int] = []
    tip = -1
    while generator.random() < 0.6:
        children = np.flatnonzero(tree.parents == tip)
        if not len(children):
            break
        tip = int(generator.choice(children))
        path.append(tip)
    kept: list[int] = []
    for node, parent in enumerate(tree.parents.tolist()):
        if (parent == tip or parent in kept) and node not in path and generator.random() < 0.8:
            kept.append(node)
    return path, kept


@pytest.mark.parametrize(
    ("path", "keep"),
    [([1], []), ([0, 3], []), ([5], []), ([0], [3]), ([0], [2, 1]), ([0], [1, 1]), ([], [2])],
)
def test_what_is_no_path_or_no_survivor_is_not_retained(
    engine: Engine, path: list[int], keep: list[int]
) -> None:
    run(engine, Work("a", 0, prompt(5), TokenTree.of([5, 6, 7, 8], [-1, 0, 0, 1])))
    with pytest.raises(ProtocolError):
        engine.retain("a", path, keep)
    assert engine.cached_len("a") == 5


def test_retaining_for_an_unknown_request_does_nothing(engine: Engine) -> None:
    engine.retain("nobody", [0])
    assert engine.cached_len("nobody") == 0
    assert len(engine.context_ids("nobody")) == 0
