"""Mixtures of experts on a CPU: experts are plain linear layers to our kernels, and no row changes
another's bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.cpu.layers import NativeMLP, NativeRouter
from cluster.engine.cpu.narrow import are_same_experts
from cluster.engine.cpu.products import products_here
from cluster.engine.engine import Engine, Work
from cluster.engine.state import engine_state
from cluster.models.experts import Experts, unstacked
from tests.support.engine.driver import (
    Factory,
    check_near,
    load_engine,
    load_oracle,
    prompt,
    rows,
    run,
)
from tests.support.engine.native import needs_native
from tests.support.errors import config_error

pytestmark = needs_native


def mixture(factory: Factory, architecture: str) -> Path:
    return factory(architecture, hidden_size=64, head_dim=16, dtype=torch.bfloat16)


def load(folder: Path, **settings: Any) -> Engine:
    return load_engine(folder, **{"dtype": "auto", "prefix_cache": False, **settings})


def test_a_router_that_widens_its_weight_keeps_its_numbers(checkpoint_factory: Factory):
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
    architecture: str, weights: str, name: str, kernels: Kernels, checkpoint_factory: Factory
):
    engine = load(mixture(checkpoint_factory, architecture), weights=weights)
    assert engine.model.weights == name
    assert engine_state(engine).kernels == "packed"
    modules = list(engine.model.module.modules())
    experts = [each for group in modules if isinstance(group, Experts) for each in group.children()]
    products = Format.BF16_PRODUCTS if kernels.multiplies_bf16 else Format.BF16
    expected = Format.GROUPS if name else products
    assert experts
    for each in experts:
        assert isinstance(each, NativeMLP)
        assert each.gate_up.format == each.down.format == expected
    routers = [vars(each)["forward"] for each in modules if "forward" in vars(each)]
    routers = [each for each in routers if isinstance(each, NativeRouter)]
    assert len(routers) >= len([each for each in modules if isinstance(each, Experts)])
    assert {each.product.format for each in routers} == {Format.BF16}


@pytest.mark.parametrize(
    "change", [lambda rows: rows.clamp(max=1.0), lambda rows: rows.flip(-1)], ids=["bound", "order"]
)
def test_experts_that_compute_something_else_stay_as_they_are(
    change: Callable[[torch.Tensor], torch.Tensor],
    checkpoint_factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
):
    oracle = load_oracle(mixture(checkpoint_factory, "mixtral"))
    oracle.set_experts_implementation("grouped_mm")
    stacked = type(oracle.model.layers[0].mlp.experts)
    gate = stacked._apply_gate
    with monkeypatch.context() as patched:
        patched.setattr(stacked, "_apply_gate", lambda self, both: gate(self, change(both)))
        unstacked(oracle, are_same_experts)
        assert not any(isinstance(each, Experts) for each in oracle.modules())
    unstacked(oracle, are_same_experts)
    assert sum(isinstance(each, Experts) for each in oracle.modules()) == 3


def test_experts_with_biases_are_not_ours(checkpoint_factory: Factory):
    with config_error(r"more than plain linear layers \(experts with biases"):
        load(checkpoint_factory("gpt-oss"), dtype="float32", reproducible=True)


def test_experts_have_the_same_bits_by_whatever_instructions(
    kernels: Kernels, checkpoint_factory: Factory
):
    engine = load(mixture(checkpoint_factory, "qwen2-moe"), weights="int4")
    found = []
    for products in products_here():
        kernels.choose_products(products)
        found.append(rows(run(engine, Work(products, 0, prompt(21)))))
        engine.release(products)
    kernels.choose_products(kernels.products)
    assert all(torch.equal(each, found[-1]) for each in found)
