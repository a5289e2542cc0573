"""The model that training starts from."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


@pytest.fixture(scope="module")
def folder(checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory("llama")


@pytest.fixture(scope="module")
def network(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
