"""The attention backends by name: the only module that knows all implementations."""

from __future__ import annotations

import importlib.util

import torch

from cluster.engine.attention.cpu import NativeBackend
from cluster.engine.attention.sdpa import SdpaBackend
from cluster.engine.attention.seam import AttentionBackend
from cluster.engine.cpu import kernels
from cluster.errors import ConfigError

NAMES = ("native", "sdpa", "triton")


def create_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend of that name; see `chosen`.  Raises ConfigError where the machine cannot run
    it."""
    match chosen(name, device):
        case "sdpa":
            return SdpaBackend()
        case "triton":
            from cluster.engine.attention.triton.backend import TritonBackend

            return TritonBackend()
    loaded = kernels.load()
    if loaded is None:
        raise ConfigError(
            "attention native needs a C++ compiler (on Debian and Ubuntu: apt install g++); "
            "install one, or use auto or sdpa",
            param="attention",
        )
    return NativeBackend(loaded)


def chosen(name: str, device: torch.device) -> str:
    """The name itself; for `auto` that of the best one for `device`.  Raises ConfigError for one
    that is unknown, or whose package is missing."""
    check_name(name)
    has_triton = importlib.util.find_spec("triton") is not None
    if name == "auto":
        # Layers that are not on the GPU are left to the reference by the Triton backend itself.
        if device.type == "cuda":
            return "triton" if has_triton else "sdpa"
        return "sdpa" if kernels.load() is None else "native"
    if name == "triton" and not has_triton:
        raise ConfigError(
            "attention triton needs the triton package; install it, or use auto or sdpa",
            param="attention",
        )
    return name


def check_name(name: str) -> None:
    """Raise ConfigError unless there is a backend of that name."""
    if name != "auto" and name not in NAMES:
        raise ConfigError(
            f"attention {name!r} is unknown; use auto or one of: {', '.join(NAMES)}",
            param="attention",
        )
