"""Some layers of a loaded model as a model of their own, which shares its weights.

What is copied is the tree of module objects, so that layers can have other indices and another
configuration; every tensor, packed weights included, is the whole model's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.engine.loading.model import LoadedModel
from cluster.engine.module_forward import decoder_layers
from cluster.errors import ConfigError
from cluster.models.experts import linear_of


def part_of(
    model: LoadedModel, layers: Sequence[int], output: torch.Tensor | None = None
) -> LoadedModel:
    """The model that consists of the embedding, these layers (ascending), the final norm and the
    output layer of `model`; raises ConfigError where its layers cannot be taken apart.

    output: [vocab, hidden], the output layer's weight in place of the model's."""
    whole = decoder_layers(model.module, len(model.layers))
    if whole is None:
        raise _refusal(model, "they do not stand in one list")
    if any(hasattr(each, "_hf_hook") for each in model.module.modules()):
        raise _refusal(model, "a device map spreads them over devices")
    if any(each.shared_with is not None for each in model.layers):
        raise _refusal(model, "some read the keys and values of others")
    config = _config_of(model.module.config, layers)
    module = _copy(model.module, model.module.config, config)
    kept = []
    for place, index in enumerate(layers):
        layer = _copy(whole[index], model.module.config, config)
        for each in layer.modules():
            if isinstance(getattr(each, "layer_idx", None), int):
                each.layer_idx = place
        kept.append(layer)
    where = next(name for name, each in model.module.named_modules() if each is whole)
    module.set_submodule(where, torch.nn.ModuleList(kept))
    if output is not None:
        module.set_output_embeddings(_output_like(module.get_output_embeddings(), output))
    return replace(
        model,
        module=module,
        layers=tuple(model.layers[index] for index in layers),
        native=None if model.native is None else model.native.of_part(module, layers),
        fused=None if model.fused is None else model.fused.of_part(module, layers),
    )


def _output_like(former: Any, weight: torch.Tensor) -> torch.nn.Module:
    """A layer of that weight, and the former one's bias, which computes as the former one does."""
    layer = linear_of(weight.to(former.weight.dtype), former.bias)
    return PackedLinear(layer, former.native) if isinstance(former, PackedLinear) else layer


def _copy(module: Any, old_config: Any, config: Any) -> Any:
    """The same module, and those in it, as other objects around the same tensors."""
    copied = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):  # of parameters, buffers, hooks
            copied.__dict__[name] = value.copy()
    for name, child in module._modules.items():
        if child is not None:
            copied._modules[name] = _copy(child, old_config, config)
    own = copied.__dict__.get("config")
    if own is old_config or own is old_config.get_text_config():
        copied.config = config if own is old_config else config.get_text_config()
    return copied


def _config_of(config: Any, layers: Sequence[int]) -> Any:
    """The configuration of these layers alone: models ask it for their number, and for the type of
    each layer."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    count = text.num_hidden_layers
    text.num_hidden_layers = len(layers)
    for name, value in vars(text).copy().items():
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, [value[index] for index in layers])
    return changed


def _refusal(model: LoadedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"{model.architecture}: some of its layers cannot draft for all of them: {reason}; remove "
        "the drafter",
        param="model",
    )
