"""Triton's interpreter, which needs a process of its own, and GPUs, which need no such."""

import importlib.util
import os

import pytest
import torch

from tests.conftest import python

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="triton is not installed")
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="test_interpreted.py runs it")
needs_gpu = pytest.mark.skipif(
    IS_INTERPRETED or not (has_triton and torch.cuda.is_available()),
    reason="this machine has no NVIDIA GPU",
)


def run_python(module: str, *arguments: str) -> str:
    """What the module says when it is run with these words, by the interpreter."""
    process = python("-m", module, *arguments, TRITON_INTERPRET="1")
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout
