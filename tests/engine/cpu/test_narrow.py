"""bfloat16 by our own kernels: what is kept in it, what is rounded, and nothing else."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.engine.attention.cpu import NativeBackend
from cluster.engine.attention.sdpa import SdpaBackend
from cluster.engine.cpu import kernels as native
from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.cpu.packed_linear import PackedLinear, linear_share
from cluster.engine.engine import Engine
from cluster.engine.loading import model
from cluster.engine.schedule.batch import Batch
from cluster.models.int8 import load_int8, save_int8
from tests.support.engine.driver import load_engine, load_oracle, rows, run, varied_works
from tests.support.engine.triton_cases import (
    DECODING,
    LARGE_TREE,
    MIXED,
    PROMPT,
    RAGGED,
    SCRATCH_SLOT,
    Case,
)

pytestmark = [
    pytest.mark.skipif(native.load() is None, reason="needs a C++ compiler"),
    pytest.mark.usefixtures("several_threads"),
]

Factory = Callable[..., Path]


@pytest.fixture
def kernels() -> Kernels:
    loaded = native.load()
    assert loaded is not None
    return loaded


def rounded(rows: torch.Tensor) -> torch.Tensor:
    return rows.bfloat16().float()


def formats(engine: Engine) -> set[Format]:
    modules = engine.model.module.modules()
    return {each.format for each in modules if isinstance(each, PackedLinear)}


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 63), (64, 64), (129, 200), (300, 130)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_in_bfloat16_are_those_of_rounded_rows_and_every_row_is_on_its_own(
    kernels: Kernels, inputs: int, outputs: int, has_bias: bool
) -> None:
    torch.manual_seed(1)
    weight = torch.randn(outputs, inputs).bfloat16()
    bias = torch.randn(outputs) if has_bias else None
    packed, given = kernels.pack(weight), torch.randn(40, inputs)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return kernels.linear(rows, packed, bias, outputs, Format.BF16_PRODUCTS)

    together = product(given)
    expected = torch.nn.functional.linear(
        rounded(given).double(), weight.double(), None if bias is None else bias.double()
    )
    torch.testing.assert_close(together.double(), expected, atol=1e-4, rtol=1e-5)
    for count in (1, 2, 3, 5, 6, 7, 11, 12, 13, 25, 39):
        assert torch.equal(product(given[-count:]), together[-count:]), count


@pytest.mark.parametrize("batch", [DECODING, LARGE_TREE, MIXED, RAGGED, PROMPT])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80])
@pytest.mark.parametrize("sharing", [1, 2, 3, 4, 7])
def test_attention_over_keys_in_bfloat16_is_the_references(
    kernels: Kernels, batch: Batch, head_dim: int, sharing: int
) -> None:
    if head_dim % kernels.lanes:
        pytest.skip("not a head that the kernel takes")
    case = Case(batch, 2 * sharing, 2, head_dim, window=70)
    query, kv = case.query(), case.kv().bfloat16().contiguous()
    plans = (NativeBackend(kernels), SdpaBackend())
    found, wanted = (
        backend.plan(batch, SCRATCH_SLOT).attend(query, keys, case.window, case.options())
        for backend, keys in zip(plans, (kv, kv.float()), strict=True)
    )
    error = (found - wanted).norm(dim=2) / wanted.norm(dim=2)
    assert float(error.max()) < 2e-2  # the queries' rounding


@pytest.mark.parametrize(
    ("architecture", "fields", "is_native"),
    [
        ("llama", {"head_dim": 16}, True),
        ("llama", {"head_dim": 32, "tie_word_embeddings": True}, True),
        ("qwen2", {}, True),
        ("qwen3", {}, True),
        ("mistral-sliding", {}, True),
        ("granite", {}, False),
        ("gemma2", {}, False),
        ("smollm3", {}, False),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_bfloat16_model_is_served_by_our_kernels_and_computes_the_same(
    kernels: Kernels,
    architecture: str,
    fields: dict[str, int],
    is_native: bool,
    checkpoint_factory: Factory,
) -> None:
    folder = checkpoint_factory(architecture, dtype=torch.bfloat16, **fields)
    narrow, wide = load_engine(folder, dtype="bfloat16"), load_engine(folder, dtype="float32")
    assert {layer.dtype for layer in narrow.layers} == {torch.bfloat16}
    assert (narrow.model.native is not None) == is_native
    assert formats(narrow) == {Format.BF16_PRODUCTS if kernels.multiplies_bf16 else Format.BF16}
    assert formats(wide) == {Format.BF16}
    for work in varied_works():
        found, wanted = rows(run(narrow, work)), rows(run(wide, work))
        error = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert float(error.median()) < 0.05  # a random network multiplies what rounding leaves
        assert float(error.max()) < 0.2
        assert float(error.max()) > 0.0  # the cache at least is rounded


@pytest.mark.parametrize(
    "settings",
    [{"attention": "sdpa"}, {"compile": True}, {"dtype": "float16"}],
    ids=lambda settings: next(iter(settings)),
)
def test_what_other_kernels_are_to_serve_is_not_widened(
    settings: dict[str, object], checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    can_widen = model.can_widen
    monkeypatch.setattr(
        model, "can_widen", lambda *given: found.append(can_widen(*given)) or found[-1]
    )
    # One layer: torch's compiler takes seconds for each.
    folder = checkpoint_factory("llama", head_dim=16, num_hidden_layers=1, dtype=torch.bfloat16)
    load_engine(folder, **{"dtype": "bfloat16", **settings})
    load_engine(folder, dtype="bfloat16")
    assert found == [False, True]


def test_weights_that_are_no_plain_linear_layers_would_take_twice_the_memory(
    checkpoint_factory: Factory,
) -> None:
    dense = load_oracle(checkpoint_factory("llama"))
    assert linear_share(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))) == 1.0
    mixed = torch.nn.Module()
    mixed.experts = torch.nn.Parameter(torch.randn(4, 64, 64))
    mixed.router = torch.nn.Linear(64, 4)
    assert linear_share(mixed) < 0.1
    assert linear_share(torch.nn.Sequential(mixed, dense)) < 0.99


def in_int8(folder: Path, target: Path) -> Path:
    """A copy of the checkpoint with its weights in int8."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "config.json", target)
    save_int8(load_file(folder / "model.safetensors"), target)
    return target


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 63), (64, 64), (129, 200), (300, 130)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_in_int8_are_those_of_the_scaled_integers_and_every_row_is_on_its_own(
    kernels: Kernels, inputs: int, outputs: int, has_bias: bool
) -> None:
    torch.manual_seed(1)
    integers = torch.randint(-127, 128, (outputs, inputs)).double()
    integers[:, 0] = 127  # which its row's scale is measured by
    scales = 2.0 ** torch.randint(-6, 2, (outputs, 1)).double()
    bias = torch.randn(outputs) if has_bias else None
    weight = (integers * scales).bfloat16()
    packed, given = kernels.pack_int8(kernels.pack(weight)), torch.randn(40, inputs)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return kernels.linear(rows, packed, bias, outputs, Format.INT8_PRODUCTS)

    together = product(given)
    expected = torch.nn.functional.linear(
        rounded(given).double(), weight.double(), None if bias is None else bias.double()
    )
    torch.testing.assert_close(together.double(), expected, atol=1e-2, rtol=1e-5)
    for count in (1, 2, 3, 5, 6, 7, 11, 12, 13, 25, 39):
        assert torch.equal(product(given[-count:]), together[-count:]), count


def test_a_model_stored_in_int8_stays_in_it_and_computes_the_same(
    kernels: Kernels, checkpoint_factory: Factory, tmp_path: Path
) -> None:
    if not kernels.multiplies_bf16:
        pytest.skip("the processor does not multiply bfloat16")
    folder = in_int8(
        checkpoint_factory("llama", head_dim=16, dtype=torch.bfloat16), tmp_path / "int8"
    )
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    shutil.copy(folder / "config.json", unpacked)
    state = load_int8(folder)
    assert state is not None
    save_file({name: each.bfloat16() for name, each in state.items()},
              unpacked / "model.safetensors", {"format": "pt"})  # fmt: skip
    packed, wide = (load_engine(each, dtype="bfloat16") for each in (folder, unpacked))
    assert formats(packed) == {Format.INT8_PRODUCTS}
    assert formats(wide) == {Format.BF16_PRODUCTS}
    for work in varied_works():
        found, wanted = rows(run(packed, work)), rows(run(wide, work))
        error = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert float(error.median()) < 0.05
        assert float(error.max()) < 0.2


def test_rounded_products_that_are_wrong_are_not_used(
    kernels: Kernels, checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = checkpoint_factory("llama", head_dim=16, dtype=torch.bfloat16)
    monkeypatch.setattr(kernels, "multiplies_bf16", True)
    assert formats(load_engine(folder, dtype="bfloat16")) == {Format.BF16_PRODUCTS}
    real = Kernels.linear

    def wrong(self: Kernels, *given: Any) -> torch.Tensor:
        return real(self, *given) * (1.1 if given[-1] == wrong_format else 1.0)

    monkeypatch.setattr(Kernels, "linear", wrong)
    wrong_format = Format.BF16_PRODUCTS
    assert formats(load_engine(folder, dtype="bfloat16")) == {Format.BF16}
    wrong_format = Format.INT8_PRODUCTS
    packed = in_int8(folder, tmp_path)
    assert formats(load_engine(packed, dtype="bfloat16")) == {Format.BF16}


def test_without_instructions_products_are_exact_and_nothing_is_called_slow(
    kernels: Kernels,
    checkpoint_factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kernels, "multiplies_bf16", False)
    monkeypatch.setattr("cluster.engine.device.cpu_flags", lambda: frozenset({"avx2"}))
    folder = checkpoint_factory("llama", head_dim=16, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        engine = load_engine(folder, dtype="bfloat16")
    assert formats(engine) == {Format.BF16}
    assert "emulated" not in caplog.text
    with caplog.at_level(logging.WARNING):
        load_engine(folder, dtype="bfloat16", attention="sdpa")
    assert "dtype bfloat16 is emulated" in caplog.text
