"""A draft head's layer shares the pages of the model's: its rows are where the page table says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.core import token_array
from cluster.engine.engine import Engine, Output, Work
from cluster.engine.memory.reach import Reach, layer_groups
from cluster.engine.types import LayerSpec
from tests.support.engine.driver import (
    GreedyDecoder,
    generate,
    load_engine,
    load_oracle,
    prompt,
    random_tree,
    rows,
    run,
)
from tests.support.engine.native import needs_native

CPU = torch.device("cpu")
# Other heads than any layer of the model has.
HEAD = (LayerSpec(1, 6, torch.float32, CPU), LayerSpec(3, 2, torch.float32, CPU))
PAGE_SIZE = 4


class Head:
    """Writes one row for each row of every step, as a head does with its keys: the token and its
    position, which tell afterwards whose row it is."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_rows = 0
        self._step = engine.step
        engine.step = self._follow  # type: ignore[method-assign, assignment]

    def _follow(self) -> list[Output]:
        outputs = self._step((-1,))
        taps = self.engine.last_step.taps
        for each in () if taps is None else taps.sequences:
            slots = self.engine.slots(each.request_id)
            end = each.first_position + each.num_context
            assert len(slots) >= end + (each.stop - each.start - each.num_context)
            context = self.engine.context_ids(each.request_id)
            tokens = context[each.first_position : end].tolist()
            positions = list(range(each.first_position, end))
            # The new nodes are the last ones of the live tree.
            sequence = self.engine.page_owners.sequences[each.request_id]
            num_nodes = each.stop - each.start - each.num_context
            first = len(sequence.tree) - num_nodes
            depths: list[int] = []
            for parent in sequence.tree.parents.tolist():
                depths.append(depths[parent] + 1 if parent >= 0 else 0)
            tokens += sequence.tree.token_ids[first:].tolist()
            positions += [end + depth for depth in depths[first:]]
            where = [*range(each.first_position, end), *range(end + first, end + first + num_nodes)]
            self._write(slots[where], tokens, positions)
            self.num_rows += len(where)
        for name in self.engine.page_owners.sequences:
            self.check(name)
        return outputs

    def _write(self, slots: np.ndarray, tokens: list[int], positions: list[int]) -> None:
        marks = torch.tensor([tokens, positions], dtype=torch.float32)
        for kv in self.engine.cache.layers[-2:]:
            for part in range(2):
                kv[torch.from_numpy(slots), part] = (
                    marks[part].view(-1, 1, 1).expand(-1, *kv.shape[2:])
                )

    def num_released(self, name: str) -> int:
        """Pages of its layers."""
        tables = self.engine.page_owners.sequences[name].tables
        return tables[self.engine.cache.group_of[-1]].num_released

    def check(self, name: str) -> int:
        """Every committed token's row lies where the model's does; returns how many."""
        tokens = self.engine.context_ids(name)
        slots = self.engine.slots(name)[: len(tokens)]
        released = self.num_released(name) * PAGE_SIZE
        for kv in self.engine.cache.layers[-2:]:
            found = kv[torch.from_numpy(slots)][released:].flatten(2)
            assert (found[:, 0] == torch.from_numpy(tokens[released:])[:, None]).all()
            assert (found[:, 1] == torch.arange(released, len(tokens))[:, None]).all()
        return len(tokens)


def head_engine(folder: Path, **settings: object) -> Head:
    plain = load_engine(folder, **settings)
    return Head(Engine(plain.config, plain.model, extra_layers=HEAD))


def test_its_pages_cost_memory_like_the_others(llama_folder: Path) -> None:
    engine = head_engine(llama_folder).engine
    own, both = (
        layer_groups(layers, PAGE_SIZE)[0].bytes_per_page()
        for layers in (engine.model.layers, engine.layers)
    )
    assert both - own == PAGE_SIZE * 2 * 4 * (1 * 6 + 3 * 2)
    assert sum(kv.nbytes for kv in engine.cache.layers) == both * (engine.pages_total + 1)
    assert [tuple(kv.shape[2:]) for kv in engine.cache.layers[-2:]] == [(1, 6), (3, 2)]


def test_a_prefix_hit_brings_its_rows_along(llama_folder: Path) -> None:
    head = head_engine(llama_folder)
    first, second = prompt(30), np.concatenate((prompt(30)[:22], prompt(9, seed=4)))
    run(head.engine, Work("a", 0, first))
    head.engine.release("a")
    run(head.engine, Work("b", 0, second))
    assert head.engine.last_step.num_prefix_hit_tokens == 20
    assert head.num_rows == 30 + 11
    assert head.check("b") == 31


def test_a_rollback_into_a_shared_page_copies_its_rows(llama_folder: Path) -> None:
    head = head_engine(llama_folder)
    run(head.engine, Work("a", 0, prompt(30)))
    run(head.engine, Work("b", 0, prompt(30)))
    run(head.engine, Work("b", 18, prompt(3, seed=5)))  # inside of a page that "a" holds as well
    assert head.check("a") == 30
    assert head.check("b") == 21
    assert head.num_rows == 30 + 2 + 3


def test_accepted_and_kept_nodes_take_its_rows_along(llama_folder: Path) -> None:
    head = head_engine(llama_folder)
    tree = random_tree(9, np.random.default_rng(3))
    run(head.engine, Work("a", 0, prompt(11), tree))
    depth_one = [node for node in range(9) if tree.parents[node] == -1]
    path = [depth_one[-1]]
    path += [node for node in range(9) if tree.parents[node] == path[0]][-1:]
    head.engine.retain("a", path)
    assert head.check("a") == 11 + len(path)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding", "gemma3"])
def test_texts_with_drafts_and_preemption_leave_every_row_in_its_place(
    architecture: str, prefix_cache: bool, checkpoint_factory: Callable[..., Path]
) -> None:
    """The head checks all its rows after every step.  Its layers look back without limit, and keep
    all pages where the model's windows let go of theirs."""
    folder = checkpoint_factory(architecture)
    oracle = load_oracle(folder)
    prompts = {"a": prompt(5, seed=1), "b": prompt(9, seed=2), "c": prompt(20, seed=3)}
    prompts["d"] = np.concatenate((prompts["c"][:17], token_array([7, 8])))
    texts = {name: generate(oracle, ids, 24) for name, ids in prompts.items()}
    head = head_engine(folder, num_pages=22, max_batch_tokens=16, prefix_cache=prefix_cache)
    decoder = GreedyDecoder(head.engine, prompts, 24, np.random.default_rng(1), texts)
    assert decoder.run() == texts
    assert decoder.num_accepted > 0
    groups = head.engine.cache.groups
    # What the windows let go of is enough to wait for without the prefix cache.
    assert decoder.num_misses > 0 or len(groups) > 1
    assert len(groups) == (1 if architecture == "llama" else 2)
    assert groups[head.engine.cache.group_of[-1]].reach.window is None


def test_a_head_with_a_window_lets_the_models_pages_go(
    checkpoint_factory: Callable[..., Path],
) -> None:
    folder = checkpoint_factory("mistral-sliding")
    plain = load_engine(folder, num_pages=18, max_batch_tokens=16)
    near = LayerSpec(1, 6, torch.float32, CPU, window=30)
    engine = Engine(plain.config, plain.model, extra_layers=(near, near))
    assert [group.reach for group in engine.cache.groups] == [Reach(30, PAGE_SIZE)]
    head = Head(engine)
    rows(run(engine, Work("a", 0, prompt(150))))
    assert head.num_released("a") > 0
    assert head.check("a") == 150


@needs_native
@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding"])
def test_the_native_forward_leaves_the_heads_layers_alone(
    architecture: str, checkpoint_factory: Callable[..., Path]
) -> None:
    """Also where they are of another group than the model's."""
    folder = checkpoint_factory(architecture, head_dim=16)
    head = head_engine(folder)
    found = rows(run(head.engine, Work("a", 0, prompt(21))))
    native = head.engine.model.native
    assert native is not None
    assert native.grows_on(head.engine.cache)
    torch.testing.assert_close(
        found, rows(run(load_engine(folder), Work("a", 0, prompt(21)))), atol=0, rtol=0
    )
    assert head.check("a") == 21


def test_an_unknown_request_has_no_slots(llama_folder: Path) -> None:
    assert len(load_engine(llama_folder).slots("nobody")) == 0
