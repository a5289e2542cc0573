"""What the configuration's words for devices and formats mean on a machine."""

from __future__ import annotations

import logging

import pytest
import torch

from cluster.engine import device
from cluster.engine.device import resolve_dtype, warn_of_emulation

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False])
def has_bfloat16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    flags = frozenset({"avx512_bf16"} if request.param else {"avx2"})
    monkeypatch.setattr(device, "cpu_flags", lambda: flags)
    return bool(request.param)


def test_a_format_that_is_emulated_is_taken_at_its_word_with_a_warning(
    has_bfloat16: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert resolve_dtype("bfloat16", CPU, torch.bfloat16) is torch.bfloat16
    assert resolve_dtype("float32", CPU, torch.bfloat16) is torch.float32
    with caplog.at_level(logging.WARNING):
        warn_of_emulation(torch.bfloat16)
        warn_of_emulation(torch.float32)
    assert ["dtype bfloat16 is emulated" in line for line in caplog.messages] == (
        [] if has_bfloat16 else [True]
    )


def test_auto_computes_an_emulated_format_in_float32(has_bfloat16: bool) -> None:
    expected = torch.bfloat16 if has_bfloat16 else torch.float32
    assert resolve_dtype("auto", CPU, torch.bfloat16) == expected
    assert resolve_dtype("auto", CPU, None) is None
    assert resolve_dtype("auto", torch.device("cuda"), torch.bfloat16) == torch.bfloat16
