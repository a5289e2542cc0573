"""Mixtures of experts on a CPU: experts are plain linear layers to our kernels, and no row changes
another's bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from cluster import cpp
from cluster.core import TokenTree
from cluster.engine.cpu import kernels as native
from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.cpu.layers import NativeMLP, NativeRouter
from cluster.engine.cpu.narrow import unstack_experts
from cluster.engine.engine import Engine, Work
from cluster.engine.state import engine_state
from cluster.errors import ConfigError
from cluster.models.experts import Experts
from cluster.models.gguf import convert
from tests.support.choices import by_day
from tests.support.engine.driver import (
    check_near,
    load_engine,
    load_oracle,
    prompt,
    random_tree,
    rows,
    run,
)
from tests.support.engine.few_bits import check_texts, widened
from tests.support.engine.native import needs_native
from tests.support.models.gguf_files import write_gguf

pytestmark = needs_native
Factory = Callable[..., Path]
FEW = [("mixtral", "int8"), ("qwen2-moe", "int4")]


def mixture(factory: Factory, architecture: str) -> Path:
    return factory(architecture, hidden_size=64, head_dim=16, dtype=torch.bfloat16)


def load(folder: Path, **settings: Any) -> Engine:
    return load_engine(folder, **{"dtype": "auto", "prefix_cache": False, **settings})


def test_a_router_that_widens_its_weight_keeps_its_numbers(checkpoint_factory: Factory) -> None:
    """In a model that stays in bfloat16, as those do whose attention our kernels lack."""
    folder = checkpoint_factory("glm4-moe", init_std=0.05)
    check_near(load_engine(folder, dtype="bfloat16", attention="sdpa"), load_engine(folder))


@pytest.mark.parametrize(
    ("architecture", "weights", "name"),
    [
        ("mixtral", "auto", ""),
        ("mixtral", "int8", "int8g32|output=int8g32"),
        ("qwen2-moe", "int4", "int4g32|output=int4g32"),
        ("glm4-moe", "int4", "int4g16+int4g32|output=int4g32"),
    ],
)
def test_experts_have_the_weights_that_are_asked_for_and_what_routes_to_them_stays_wide(
    architecture: str, weights: str, name: str, checkpoint_factory: Factory
) -> None:
    engine = load(mixture(checkpoint_factory, architecture), weights=weights)
    assert engine.model.weights == name
    assert engine_state(engine).kernels == "packed"
    modules = list(engine.model.module.modules())
    experts = [each for group in modules if isinstance(group, Experts) for each in group.children()]
    expected = Format.GROUPS if name else Format.BF16_PRODUCTS
    if not name and not native.load().multiplies_bf16:  # type: ignore[union-attr]
        expected = Format.BF16
    assert experts
    for each in experts:
        assert isinstance(each, NativeMLP)
        assert each.gate_up.format == each.down.format == expected
    routers = [vars(each)["forward"] for each in modules if "forward" in vars(each)]
    routers = [each for each in routers if isinstance(each, NativeRouter)]
    assert len(routers) >= len([each for each in modules if isinstance(each, Experts)])
    assert {each.product.format for each in routers} == {Format.BF16}


@pytest.mark.parametrize(("architecture", "kind"), by_day(FEW, [*FEW, ("qwen2-moe", "Q4_1")]))
def test_greedy_text_is_that_of_transformers_with_the_weights_that_they_stand_for(
    architecture: str, kind: str, checkpoint_factory: Factory, tmp_path: Path
) -> None:
    """Rows go where transformers sends them, by equal shares: 2 of 100 rows stand so near between
    two experts that the rounding of keys to bfloat16 sends them to another one, and then these
    random networks say something else.  Routers themselves are compared in float32, in
    test_architectures.py."""
    folder = mixture(checkpoint_factory, architecture)
    settings = {"weights": kind} if kind.startswith("int") else {}
    if not settings:
        file = write_gguf(folder, tmp_path / "x.gguf", kind=GGMLQuantizationType[kind])
        folder = tmp_path / "blocks"
        convert(file, folder)
    engine = load(folder, **settings)
    assert engine.model.weights
    check_texts(engine, widened(folder, settings))


@pytest.mark.parametrize(
    "architecture", by_day(["glm4-moe", "phimoe"], ["mixtral", "qwen2-moe", "glm4-moe", "phimoe"])
)
@pytest.mark.parametrize(
    "settings", by_day([{"weights": "int4"}], [{"dtype": "float32"}, {"weights": "int4"}]), ids=str
)
def test_a_row_depends_on_no_other_one(
    architecture: str, settings: dict[str, Any], checkpoint_factory: Factory
) -> None:
    """Not by routing either: a choice that falls otherwise changes all that follows."""
    folder = mixture(checkpoint_factory, architecture)
    engine = load(folder, reproducible=True, num_pages=1024, **settings)
    text, start = prompt(60), 30
    alone = [rows(run(engine, Work("plain", 0, text[:start])))[-1]]
    alone += [
        rows(run(engine, Work("plain", at, text[at : at + 1])))[-1] for at in range(start, 60)
    ]
    engine.release("plain")
    for size in (1, 3, 9, 30):
        others = random_tree(6, np.random.default_rng(size))
        tree = TokenTree.of(
            [*others.token_ids.tolist(), *text[start : start + size].tolist()],
            [*others.parents.tolist(), -1, *range(6, 5 + size)],
        )
        found = rows(run(engine, Work("tree", 0, text[:start], tree)))[-1 - len(tree) :]
        engine.release("tree")
        assert torch.equal(torch.cat((found[:1], found[7:])), torch.stack(alone[: size + 1])), size
    for cut in (1, 7, 29, 45):
        engine.submit(Work("beside", 0, prompt(11, seed=cut)))
        run(engine, Work("cut", 0, text[:cut]))
        assert torch.equal(rows(run(engine, Work("cut", cut, text[cut:])))[-1], alone[-1]), cut
        engine.release("cut")
        engine.release("beside")


@pytest.mark.parametrize(
    "change", [lambda rows: rows.clamp(max=1.0), lambda rows: rows.flip(-1)], ids=["bound", "order"]
)
def test_experts_that_compute_something_else_stay_as_they_are(
    change: Callable[[torch.Tensor], torch.Tensor],
    checkpoint_factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    oracle = load_oracle(mixture(checkpoint_factory, "mixtral"))
    oracle.set_experts_implementation("grouped_mm")
    stacked = type(oracle.model.layers[0].mlp.experts)
    gate = stacked._apply_gate
    with monkeypatch.context() as patched:
        patched.setattr(stacked, "_apply_gate", lambda self, both: gate(self, change(both)))
        unstack_experts(oracle)
        assert not any(isinstance(each, Experts) for each in oracle.modules())
    unstack_experts(oracle)
    assert sum(isinstance(each, Experts) for each in oracle.modules()) == 3


def test_experts_with_biases_are_not_ours(checkpoint_factory: Factory) -> None:
    with pytest.raises(ConfigError, match=r"more than plain linear layers \(experts with biases"):
        load(checkpoint_factory("gpt-oss"), dtype="float32", reproducible=True)


def test_experts_have_the_same_bits_by_whatever_instructions(
    kernels: Kernels, checkpoint_factory: Factory
) -> None:
    engine = load(mixture(checkpoint_factory, "qwen2-moe"), weights="int4")
    found = []
    for products in cpp.products():
        kernels.choose_products(products)
        found.append(rows(run(engine, Work(products, 0, prompt(21)))))
        engine.release(products)
    kernels.choose_products(kernels.products)
    assert all(torch.equal(each, found[-1]) for each in found)
