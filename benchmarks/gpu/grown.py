"""Builds a grown target in memory, without writing gigabytes to disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from benchmarks.grown.layers import DTYPES, Grower, Shape, Weights, shape_of
from benchmarks.support.options import DEMO_TARGET
from cluster.config.schema import EngineConfig
from cluster.engine.attention import seam
from cluster.engine.loading.model import LoadedModel
from cluster.engine.loading.probe import probe_layers

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def load_grown(shape: Shape, config: EngineConfig, device: torch.device) -> LoadedModel:
    """The demonstration target grown to `shape`; config.dtype must be a key of DTYPES."""
    seam.register()
    grower = Grower(DEMO_TARGET, shape, seed=0)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(
            grower.grown_config,
            dtype=DTYPES[config.dtype],
            attn_implementation=seam.IMPLEMENTATION,
        )
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for weights in _parts(shape):
            for name, tensor in weights.items():
                parameters.pop(name).copy_(tensor)
    if parameters:
        raise ValueError(f"the grown weights lack {min(parameters)}")
    module.eval()
    module.requires_grad_(False)
    with torch.inference_mode():
        layers, activation_bytes = probe_layers(module, config, device)
    return LoadedModel(
        module=module,
        source=str(DEMO_TARGET),
        architecture=type(module).__name__,
        layers=layers,
        device=device,
        vocab_size=int(module.config.vocab_size),
        max_context_len=int(module.config.max_position_embeddings),
        eos_token_ids=(),
        activation_bytes=activation_bytes,
    )


def weight_bytes(model: LoadedModel) -> int:
    """Bytes that one step reads: every weight once; a tied embedding counts as the output layer."""
    return sum(parameter.nbytes for parameter in model.module.parameters())


def _parts(shape: Shape) -> Iterator[Weights]:
    """`Grower.parts`, except that all layers that only pass on the residual are equal.

    Their values are multiplied by zero, so only their size matters, and drawing random numbers for
    every layer of an 8B shape takes minutes on a CPU.
    """
    source = Grower(DEMO_TARGET, shape, seed=0).source_config
    spare = shape_of(source).layers
    short = Grower(DEMO_TARGET, replace(shape, layers=min(shape.layers, spare + 1)), seed=0)
    for weights in short.parts():
        yield weights
        if any(name.startswith(f"model.layers.{spare}.") for name in weights):
            for layer in range(spare + 1, shape.layers):
                yield {
                    _LAYER.sub(f"model.layers.{layer}.", name): tensor
                    for name, tensor in weights.items()
                }
