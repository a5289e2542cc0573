"""The conditions of `reproducible: true` on a model and a machine.

A matrix product may sum in another order when it has more rows, so a step that verifies guesses and
one that does not can differ in the last bit, and a near-tie then falls the other way.  Our CPU
kernels compute every row by itself, products and attention both: a row's logits depend on its own
prefix alone, with speculation on or off, in any batch, however a prompt was cut into chunks.
What else a layer does (norms, rotations, activations) goes row by row as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cluster.config.schema import EngineConfig
from cluster.engine.cpu import kernels
from cluster.engine.cpu.packed_linear import is_native
from cluster.engine.types import LayerSpec
from cluster.errors import ConfigError


def check_reproducible(
    module: torch.nn.Module,
    config: EngineConfig,
    device: torch.device,
    text_config: Any,
    layers: Sequence[LayerSpec],
) -> None:
    """Raise ConfigError, with the remedy, where a row's bits would depend on other rows.

    text_config: transformers' of the decoder.  layers: as probed.
    """
    native = kernels.load() if device.type == "cpu" else None
    if device.type != "cpu":
        reason = f"it is not built for {device.type} devices; set device: cpu"
    elif config.tensor_parallel > 1:
        reason = "it is for one process; set tensor_parallel: 1"
    elif config.attention not in ("auto", "native"):
        reason = f"attention {config.attention} computes rows together; use auto or native"
    elif native is None:
        reason = "it needs a C++ compiler (on Debian and Ubuntu: apt install g++)"
    elif any(each.state for each in layers):
        reason = "layers of the delta rule compute a text's rows together; serve it without"
    elif not all(native.attends(int(text_config.num_attention_heads), each) for each in layers):
        reason = (
            f"its kernels attend with heads of a multiple of {native.lanes} and up to "
            f"{native.max_sharing} query heads per key head; {type(module).__name__} has others"
        )
    elif not is_native(module):
        reason = (
            f"{type(module).__name__} multiplies with more than plain linear layers (experts "
            "with biases, quantised weights); serve it without"
        )
    else:
        return
    raise ConfigError(f"reproducible: true is refused: {reason}", param="reproducible")
