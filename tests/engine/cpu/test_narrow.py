"""bfloat16 by our own kernels: what is kept in it, what is rounded, and nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.engine import Work
from cluster.models.grouped import load_int8
from tests.support.engine.altered import altered, in_int8
from tests.support.engine.driver import (
    Factory,
    last_logits,
    load_engine,
    load_oracle,
    prompt,
    rows,
    run,
)
from tests.support.engine.native import formats, needs_native
from tests.support.engine.products import rounding_rows

pytestmark = [needs_native, pytest.mark.usefixtures("several_threads")]


def test_a_model_stored_in_int8_stays_in_it_and_computes_the_same(
    checkpoint_factory: Factory, tmp_path: Path
):
    source = checkpoint_factory("llama", head_dim=16, dtype=torch.bfloat16)
    folder = in_int8(source, tmp_path / "int8")

    def unpack(state: dict[str, torch.Tensor]) -> None:
        state |= {name: each.bfloat16() for name, each in load_int8(folder).items()}

    engine = load_engine(folder, dtype="bfloat16")
    oracle = load_oracle(altered(source, tmp_path / "unpacked", change=unpack))
    assert formats(engine) == {Format.GROUPS}
    found, explained = [], []
    for seed in range(12):
        text = prompt(20 + seed, seed)
        expected = last_logits(oracle, text)
        with rounding_rows(oracle):
            explained.append(float((last_logits(oracle, text) - expected).norm() / expected.norm()))
        (row,) = rows(run(engine, Work(f"{seed}", 0, text)))
        found.append(float((row - expected).norm() / expected.norm()))
    # A random network multiplies what rounding its layers' inputs leaves.
    assert np.median(found) < 2.0 * np.median(explained) < 0.2


def test_rounded_products_that_are_wrong_are_not_used(
    kernels: Kernels, checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    folder = checkpoint_factory("llama", head_dim=16, dtype=torch.bfloat16)
    monkeypatch.setattr(kernels, "multiplies_bf16", True)
    assert formats(load_engine(folder, dtype="bfloat16")) == {Format.BF16_PRODUCTS}
    real = Kernels.linear

    def wrong(self: Kernels, *given: Any) -> torch.Tensor:
        return real(self, *given) * (1.1 if given[-1] == wrong_format else 1.0)

    monkeypatch.setattr(Kernels, "linear", wrong)
    wrong_format = Format.BF16_PRODUCTS
    assert formats(load_engine(folder, dtype="bfloat16")) == {Format.BF16}
    wrong_format = Format.GROUPS
    packed = in_int8(folder, tmp_path / "int8")
    assert formats(load_engine(packed, dtype="bfloat16")) == {Format.BF16_PRODUCTS}


def test_without_instructions_products_are_exact_and_nothing_is_called_slow(
    kernels: Kernels,
    checkpoint_factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(kernels, "multiplies_bf16", False)
    monkeypatch.setattr("cluster.engine.device.cpu_flags", lambda: frozenset({"avx2"}))
    folder = checkpoint_factory("llama", head_dim=16, dtype=torch.bfloat16)
    assert formats(load_engine(folder, dtype="bfloat16")) == {Format.BF16}
    assert "emulated" not in caplog.text
    load_engine(folder, dtype="bfloat16", attention="sdpa")
    assert "dtype bfloat16 is emulated" in caplog.text
