"""Attention that fails the check at load gives way to the reference, where that is allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.engine.attention.cpu import NativeBackend
from cluster.engine.attention.sdpa import SdpaBackend
from cluster.engine.cpu import kernels
from cluster.errors import ConfigError
from tests.support.engine.driver import load_engine

needs_native = pytest.mark.skipif(kernels.load() is None, reason="this machine has no C++ compiler")


def failing() -> None:
    raise ConfigError("a layer is wrong")


@needs_native
def test_another_backend_is_taken_where_the_first_one_fails_the_check(llama_folder: Path) -> None:
    forward = load_engine(llama_folder, attention="auto").forward
    assert isinstance(forward._backend, NativeBackend)
    answers = iter([ConfigError("a layer is wrong"), None])

    def check() -> None:
        error = next(answers)
        if error is not None:
            raise error

    forward.settle(check)
    assert isinstance(forward._backend, SdpaBackend)


@needs_native
@pytest.mark.parametrize("settings", [{"attention": "native"}, {"reproducible": True}])
def test_what_was_asked_for_is_refused_and_not_replaced(
    checkpoint_factory: Callable[..., Path], settings: dict[str, Any]
) -> None:
    # Heads of a size that the native kernels attend with, as reproducible mode wants.
    folder = checkpoint_factory("llama", head_dim=16)
    forward = load_engine(folder, **settings).forward
    with pytest.raises(ConfigError, match="a layer is wrong"):
        forward.settle(failing)
    assert isinstance(forward._backend, NativeBackend)
