"""Budget, order, fairness and preemption."""

from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.core import EMPTY_TOKENS, EMPTY_TREE, TokenTree, token_array
from cluster.engine.engine import Engine, Output, Work
from cluster.errors import RequestError
from tests.support.engine.driver import (
    GreedyDecoder,
    generate_all,
    load_engine,
    load_oracle,
    num_cached,
    prompt,
    random_tree,
    rows,
    run,
)
from tests.support.engine.integrity import check_integrity

PROMPTS = {f"r{index}": prompt(3 + 5 * index, seed=index) for index in range(16)}


def answered(engine: Engine) -> list[str]:
    """The requests that a step has answered."""
    return [output.request_id for output in engine.step()]


@pytest.mark.parametrize("drafts", [False, True])
def test_no_more_sequences_hold_pages_than_may_run(llama_folder: Path, drafts: bool):
    texts = generate_all(load_oracle(llama_folder), PROMPTS, 20)
    engine = load_engine(llama_folder, max_running_sequences=3, prefix_cache=False)
    generator = np.random.default_rng(1) if drafts else None
    decoder = GreedyDecoder(engine, PROMPTS, 20, generator, texts)
    most = 0
    step = engine.step

    def counted() -> list[Output]:
        nonlocal most
        outputs = step()
        most = max(most, sum(engine.cached_len(name) > 0 for name in texts))
        return outputs

    engine.step = counted
    assert decoder.run() == texts
    assert most == 3
    assert engine.pages_in_use == 0


def test_an_older_request_takes_the_place_of_the_youngest(llama_folder: Path):
    engine = load_engine(llama_folder, max_running_sequences=2)
    engine.submit(Work("old", 0, prompt(5)))
    engine.step()
    for name in ("b", "c"):
        engine.submit(Work(name, 0, prompt(9, seed=3)))
        engine.step()
    assert engine.cached_len("c") == 0  # it waits
    assert not engine.has_pending
    engine.release("b")
    assert answered(engine) == ["c"]
    engine.retain("old", [])
    engine.page_owners.evacuate(engine.page_owners.sequences["old"])
    engine.submit(Work("old", 0, prompt(5)))
    engine.submit(Work("d", 0, prompt(5)))
    assert answered(engine) == ["old"]
    engine.submit(Work("c", 9, prompt(1)))
    assert answered(engine) == ["c"]


def test_a_step_never_exceeds_its_rows(llama_folder: Path):
    engine = load_engine(llama_folder, max_batch_tokens=16)
    for name, ids in PROMPTS.items():
        engine.submit(Work(name, 0, ids, TokenTree.of([5, 6], [-1, 0])))
    answered = 0
    while engine.has_pending:
        answered += len(engine.step())
        assert 0 < engine.last_step.num_rows <= 16
    assert answered == 16


def test_decoding_goes_on_beside_a_long_prefill(llama_folder: Path):
    engine = load_engine(llama_folder, max_batch_tokens=32)
    run(engine, Work("decoding", 0, prompt(5)))
    engine.submit(Work("long", 0, prompt(200, seed=1)))
    for step in range(7):
        engine.submit(Work("decoding", 5 + step, token_array([7])))
        assert set(answered(engine)) == {"decoding", *(["long"] if step == 6 else [])}
        assert step == 6 or engine.last_step.num_prefill_rows == 31


def test_prefill_goes_on_beside_crowded_decoding(llama_folder: Path):
    """Decoding alone would fill every step; a quarter of the rows is the prefill's."""
    engine = load_engine(llama_folder, max_batch_tokens=16)
    names = [f"d{index}" for index in range(16)]
    for name in names:
        run(engine, Work(name, 0, prompt(5, seed=len(name))))
    engine.submit(Work("long", 0, prompt(40, seed=1)))
    lens = dict.fromkeys(names, 5)
    waiting = set()
    for _ in range(11):
        for name in names:
            if name not in waiting:
                engine.submit(Work(name, lens[name], token_array([7])))
                waiting.add(name)
        for output in engine.step():
            if output.request_id == "long":
                # Every other request has been served in turn as well.
                assert min(lens.values()) > 8
                return
            lens[output.request_id] += 1
            waiting.discard(output.request_id)
    raise AssertionError("the prefill starved")


def test_prefills_run_in_order_of_arrival(llama_folder: Path):
    engine = load_engine(llama_folder, max_batch_tokens=16, prefix_cache=False)
    for index in range(3):
        engine.submit(Work(f"r{index}", 0, prompt(100, seed=index)))
    order = []
    while engine.has_pending:
        order += answered(engine)
    assert order == ["r0", "r1", "r2"]


def test_the_oldest_takes_the_pages_of_the_youngest(llama_folder: Path):
    engine = load_engine(llama_folder, num_pages=8)
    names = ("old", "middle", "young")
    for name in names:
        run(engine, Work(name, 0, prompt(8, seed=len(name))))
    # But never for a step that runs ahead, while rows of the last one are still read.
    assert engine.run_ahead([Work(name, 8, prompt(1)) for name in names], None, ()) is None
    run(engine, Work("old", 8, prompt(10)))
    assert engine.last_step.num_preempted == 1
    assert engine.cached_len("young") == 0
    assert engine.cached_len("middle") == 8
    assert run(engine, Work("young", 8, prompt(1))).have_len == 0


def test_a_younger_request_waits_for_pages_and_gets_them(llama_folder: Path):
    engine = load_engine(llama_folder, num_pages=8, prefix_cache=False)
    run(engine, Work("old", 0, prompt(28)))
    engine.submit(Work("young", 0, prompt(8)))
    assert engine.step() == []
    assert not engine.has_pending  # nothing can run until somebody lets go
    engine.release("old")
    assert engine.has_pending
    (output,) = engine.step()
    assert output.request_id == "young"
    assert len(rows(output)) == 1


def test_a_request_that_holds_every_page_may_roll_back_into_one_that_it_published(
    llama_folder: Path,
):
    engine = load_engine(llama_folder, num_pages=8)
    run(engine, Work("a", 0, prompt(32)))
    assert engine.pages_in_use == engine.pages_total
    changed = np.concatenate((prompt(30), prompt(2, seed=1)))
    # What others may share is not written over: it goes back to where the page begins.
    assert run(engine, Work("a", 30, changed[30:])).have_len == 28
    found = rows(run(engine, Work("a", 28, changed[28:])))
    torch.testing.assert_close(found, rows(run(load_engine(llama_folder), Work("b", 0, changed))))
    check_integrity(engine)


def test_an_old_request_that_cannot_grow_yet_takes_nothing_from_the_young(
    llama_folder: Path,
):
    engine = load_engine(llama_folder, num_pages=10, prefix_cache=False)
    run(engine, Work("oldest", 0, prompt(20)))
    run(engine, Work("old", 0, prompt(8)))
    run(engine, Work("young", 0, prompt(8)))
    engine.submit(Work("old", 8, prompt(20)))
    engine.submit(Work("young", 8, prompt(1)))
    assert answered(engine) == ["young"]
    assert engine.last_step.num_preempted == 0


def test_cached_prefixes_give_way_before_anybody_is_preempted(llama_folder: Path):
    engine = load_engine(llama_folder, num_pages=8)
    run(engine, Work("gone", 0, prompt(16)))
    engine.release("gone")
    run(engine, Work("a", 0, prompt(12, seed=1)))
    run(engine, Work("b", 0, prompt(20, seed=2)))
    assert num_cached(engine) == 0
    assert engine.cached_len("a") == 12


def test_releasing_a_pending_work_cancels_it(llama_folder: Path):
    engine = load_engine(llama_folder, max_batch_tokens=16)
    engine.submit(Work("a", 0, prompt(100)))
    engine.step()
    engine.release("a")
    assert not engine.has_pending
    assert engine.pages_in_use == 0
    engine.release("a")
    assert rows(run(engine, Work("a", 0, prompt(5)))).shape[0] == 1


@pytest.mark.parametrize(
    ("work", "remedy"),
    [
        (Work("a", 0, prompt(513)), "the limit is 512"),
        (Work("a", 500, prompt(20)), "the limit is 512"),
        (Work("a", 0, prompt(150)), "raise engine.num_pages"),
        (Work("a", 0, prompt(1), TokenTree.chain(list(range(40)))), "raise engine.max_batch"),
        (Work("a", 0, token_array([288])), "0..287"),
        (Work("a", 0, token_array([-1])), "0..287"),
        (Work("a", 0, prompt(1), TokenTree.of([288], [-1])), "0..287"),
        (Work("a", 0, prompt(1), adapter=2), "adapter 2 is asked for, which is not loaded; use 0"),
    ],
)
def test_works_that_can_never_run_are_answered_with_the_remedy(
    llama_folder: Path, work: Work, remedy: str
):
    engine = load_engine(llama_folder, num_pages=36, max_batch_tokens=32)
    engine.submit(Work("other", 0, prompt(5)))
    engine.submit(work)
    outputs = {output.request_id: output for output in engine.step()}
    error = outputs["a"].error
    assert isinstance(error, RequestError)
    assert remedy in error.message
    assert outputs["other"].logits is not None


def test_an_empty_work_is_answered_without_rows(llama_folder: Path):
    engine = load_engine(llama_folder)
    run(engine, Work("a", 0, prompt(5)))
    assert rows(run(engine, Work("a", 5, EMPTY_TOKENS, EMPTY_TREE))).shape == (0, 288)


@pytest.mark.parametrize("num_nodes", [80, 120])
def test_a_large_tree_is_no_prefill_and_runs_beside_one(llama_folder: Path, num_nodes: int):
    engine = load_engine(llama_folder, max_batch_tokens=128)
    run(engine, Work("decoding", 0, prompt(5)))
    tree = random_tree(num_nodes, np.random.default_rng(2))
    run(engine, Work("decoding", 5, token_array([7]), tree))
    assert engine.last_step.num_rows == num_nodes + 1
    assert engine.last_step.num_prefill_rows == 0
    engine.submit(Work("long", 0, prompt(500, seed=1)))
    output = run(engine, Work("decoding", 6, token_array([7]), tree))
    assert rows(output).shape[0] == num_nodes + 1
    if num_nodes == 80:  # the other one leaves a prefill less than its share
        assert engine.last_step.num_prefill_rows == 128 - 81
        assert engine.has_pending
