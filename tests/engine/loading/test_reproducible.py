"""`reproducible: true`: a row's logits depend on its own prefix alone, to the bit."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.core import TokenTree
from cluster.engine.cpu import kernels
from cluster.engine.engine import Engine, Work
from cluster.worker.build import native_build
from tests.support.choices import by_day
from tests.support.engine.driver import Factory, load_engine, prompt, random_tree, rows, run
from tests.support.engine.native import needs_native
from tests.support.errors import config_error

pytestmark = needs_native

# Crosses two of the attention kernel's chunks of 64 keys, the second one within its last 20 tokens.
LENGTH = 140
FEW_BITS = [{"dtype": "auto", "weights": "int4"}]
# Heads of 16 and of 64: keys that are widened, and keys that are multiplied in pairs.  And mixtures
# of experts, where a choice that falls otherwise changes all that follows.
ENGINES = [
    ("llama", {"head_dim": 16}, {"dtype": "float32"}),
    ("llama", {"head_dim": 16}, {"dtype": "bfloat16"}),
    ("llama", {"head_dim": 64}, {"dtype": "bfloat16", "weights": "int4"}),
    *(
        (name, {"hidden_size": 64, "head_dim": 16, "dtype": torch.bfloat16}, settings)
        for name in by_day(["glm4-moe", "phimoe"], ["mixtral", "qwen2-moe", "glm4-moe", "phimoe"])
        for settings in by_day(FEW_BITS, [{"dtype": "float32"}, *FEW_BITS])
    ),
]


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def engine(request: pytest.FixtureRequest, checkpoint_factory: Factory) -> Engine:
    architecture, fields, settings = request.param
    folder = checkpoint_factory(architecture, max_position_embeddings=256, **fields)
    known = {"prefix_cache": False, "num_pages": 1024, **settings}
    return load_engine(folder, reproducible=True, **known)


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """As in a worker process (`divide_cores`)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plainly(engine: Engine, text: np.ndarray, start: int) -> torch.Tensor:
    """Logits after text[:start], text[:start + 1] and so on, one token per step."""
    works = [Work("plain", 0, text[:start])]
    works += [Work("plain", at, text[at : at + 1]) for at in range(start, len(text))]
    found = [rows(run(engine, work))[-1:] for work in works]
    engine.release("plain")
    return torch.cat(found)


def test_a_path_of_a_tree_gives_the_bits_of_plain_decoding(engine: Engine):
    text = prompt(LENGTH)
    expected = plainly(engine, text, LENGTH - 20)
    for depth in (1, 2, 5, 12, 20):
        start = LENGTH - 20
        # The text as one branch, strangers' branches before and behind it.
        others = random_tree(6, np.random.default_rng(depth))
        chain = [-1, *range(len(others), len(others) + depth - 1)]
        tree = TokenTree.of(
            [*others.token_ids.tolist(), *text[start : start + depth].tolist(), 5, 6],
            [*others.parents.tolist(), *chain, -1, -1],
        )
        found = rows(run(engine, Work("tree", 0, text[:start], tree)))
        engine.release("tree")
        first = len(found) - len(tree)
        wanted = torch.cat((found[first - 1 : first], found[first + 6 : first + 6 + depth]))
        assert torch.equal(wanted, expected[: depth + 1]), depth


def test_a_prompts_chunks_and_neighbours_change_no_bit(engine: Engine):
    text = prompt(LENGTH)
    expected = rows(run(engine, Work("alone", 0, text)))[-1]
    engine.release("alone")
    generator = np.random.default_rng(1)
    for trial in range(8):
        neighbours = [f"n{index}" for index in range(int(generator.integers(1, 7)))]
        for index, name in enumerate(neighbours):
            length = int(generator.integers(1, 90))
            tree = random_tree(int(generator.integers(0, 9)), generator)
            engine.submit(Work(name, 0, prompt(length, seed=index), tree))
        cut = int(generator.integers(1, LENGTH))
        run(engine, Work("cut", 0, text[:cut]))
        found = rows(run(engine, Work("cut", cut, text[cut:])))[-1]
        assert torch.equal(found, expected), (trial, cut)
        while engine.has_pending:
            engine.step()
        for name in (*neighbours, "cut"):
            engine.release(name)


def test_a_rows_place_among_many_changes_no_bit(engine: Engine):
    text = prompt(40)
    expected = plainly(engine, text, 39)[-1]
    for count in (1, 2, 5, 6, 7, 12, 13, 30):
        names = [str(index) for index in range(count)]
        for name in names:
            engine.submit(Work(name, 0, text[:39]))
        while engine.has_pending:
            engine.step()
        for name in names:
            engine.submit(Work(name, 39, text[39:]))
        outputs = engine.step()
        assert len(outputs) == count
        for output in outputs:
            assert torch.equal(rows(output)[-1], expected), count
            engine.release(output.request_id)


def test_targets_on_other_processors_are_built_alike(engine: Engine):
    """So that they may serve the same texts; where torch computes a part, the build must be one."""
    native = kernels.load()
    whole = f"sources-{native.sources}"
    assert native_build(engine) == (native.build if engine.model.native is None else whole)


@pytest.mark.parametrize(
    ("fields", "settings", "remedy"),
    [
        ({}, {"attention": "sdpa"}, "use auto or native"),
        ({"head_dim": 10}, {}, "heads of a multiple of"),
    ],
)
def test_what_cannot_be_reproducible_is_refused(
    fields: dict[str, int],
    settings: dict[str, str],
    remedy: str,
    checkpoint_factory: Factory,
):
    with config_error(remedy):
        load_engine(checkpoint_factory("llama", **fields), reproducible=True, **settings)


def test_without_a_compiler_it_is_refused_with_the_remedy(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kernels, "load", lambda: None)
    with config_error(r"apt install g\+\+"):
        load_engine(llama_folder, reproducible=True)
