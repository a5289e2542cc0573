"""What is planned of a model's memory on a CPU is what loading takes."""

from typing import Any

import pytest
import torch

from cluster.config.schema import EngineConfig
from cluster.engine.cpu.layers import NativeRouter
from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.engine.loading.inspection import describe
from cluster.engine.loading.model import load_model
from cluster.engine.loading.planned import planned
from tests.support.engine.driver import Factory
from tests.support.engine.native import needs_native


def bytes_of(module: torch.nn.Module) -> int:
    """Of all weights, packed ones in their form and shared ones once."""
    modules = list(module.modules())
    routers = [vars(each).get("forward") for each in modules]
    packed = [each for each in modules if isinstance(each, PackedLinear)]
    packed += [each.product for each in routers if isinstance(each, NativeRouter)]
    tensors = [*module.parameters(), *(each.packed for each in packed)]
    places = [each if each.is_mkldnn else each.data_ptr() for each in tensors]  # oneDNN shows none
    return sum({place: each.nbytes for place, each in zip(places, tensors, strict=True)}.values())


@needs_native
@pytest.mark.parametrize("weights", ["auto", "int4"])
@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        ("llama", {}),
        ("gemma2", {}),  # its embedding scales its rows
        ("llama", {"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 16}),
        ("llama", {"head_dim": 4}),
        ("mixtral", {}),
        ("qwen2-moe", {}),
    ],
    ids=str,
)
def test_the_weights_and_the_cache_have_the_format_that_is_planned(
    architecture: str, shape: dict[str, Any], weights: str, checkpoint_factory: Factory
):
    fields = {"hidden_size": 64, "vocab_size": 4096, **shape}
    folder = checkpoint_factory(architecture, dtype=torch.bfloat16, **fields)
    config = EngineConfig(model=str(folder), device="cpu", num_pages=16, weights=weights)
    loaded = load_model(config)
    sizes = planned(folder, describe(folder, config), config, is_here=True)
    # Blocks of outputs are padded.
    assert sizes.weights == pytest.approx(bytes_of(loaded.module), rel=0.1)
    layer = loaded.layers[0]
    of_layer = 2 * layer.num_kv_heads * layer.head_dim * layer.dtype.itemsize
    assert sizes.kv_per_token == of_layer * len(loaded.layers)
