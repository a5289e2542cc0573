"""Learns, from one forward, what each attention layer caches and how far it looks back.

Configurations name windows in many ways, and some models keep theirs to themselves.  But every
model asks transformers for its masks, so the probe registers an attention implementation whose
"mask" is one number, the window, and reads it where the layer attends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from cluster.engine.attention import latent
from cluster.engine.attention.convolution import PathConvolution
from cluster.engine.attention.delta import PathDelta
from cluster.engine.attention.delta_rule import delta_layer
from cluster.engine.attention.seam import IMPLEMENTATION, adopt, layer_index
from cluster.engine.types import LayerSpec
from cluster.errors import ConfigError

_IMPLEMENTATION = "tree_paged_probe"
_NUM_ROWS = 4


class Probe:
    """A plan that takes notes of the layers it is shown; the forward's result is of no use."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerSpec] = {}
        # By layer; a layer that is given the very keys of another has none of its own.
        self._keys: dict[int, weakref.ref[torch.Tensor]] = {}

    def note(
        self,
        module: torch.nn.Module,
        shape: torch.Size,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
    ) -> None:
        index = layer_index(module)
        if key.shape != value.shape or key.shape[-1] != shape[-1]:
            raise _refusal(
                f"keys and values of layer {index} differ in shape ({list(key.shape)} and "
                f"{list(value.shape)})"
            )
        own = LayerSpec(key.shape[1], key.shape[3], key.dtype, key.device, window)
        if isinstance(module, latent.LatentAttention):
            own = replace(own, head_dim=own.head_dim // 2, is_latent=True)
        owner = next((each for each, other in self._keys.items() if other() is key), None)
        if owner is None:
            self._keys[index] = weakref.ref(key)
        self._add(index, replace(own, shared_with=owner))

    def convolve_layer(
        self, layer: int, states: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        size, kernel = states.shape[1] // 2, weight.shape[1]
        own = LayerSpec(1, size, states.dtype, states.device, kernel, is_convolution=True)
        self._add(layer, own)
        return states

    def delta_layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: torch.Tensor,
    ) -> torch.Tensor:
        """The layer's convolution has been noted before."""
        own = self.layers[layer]
        assert own.window is not None
        (key_heads, key_dim), (heads, value_dim) = key.shape[1:], value.shape[1:]
        self.layers[layer] = delta_layer(key_heads, key_dim, heads, value_dim, own.window, own)
        return value

    def _add(self, index: int, layer: LayerSpec) -> None:
        if index in self.layers:
            raise _refusal(f"layer {index} attends twice per forward")
        self.layers[index] = layer


def probe_layers(module: Any, device: torch.device) -> tuple[LayerSpec, ...]:
    """The layers in order.

    module: the transformers model.  Raises ConfigError, naming it, if it cannot be served.
    """
    adopt(module, "ShortConv", PathConvolution)
    adopt(module, "GatedDeltaNet", PathDelta)
    latent.adopt(module)
    AttentionInterface.register(_IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(_IMPLEMENTATION, _mask)
    probe = Probe()
    module.set_attn_implementation(_IMPLEMENTATION)
    try:
        module(
            input_ids=torch.zeros((1, _NUM_ROWS), dtype=torch.int64, device=device),
            position_ids=torch.arange(_NUM_ROWS, device=device).unsqueeze(0),
            use_cache=False,
            # As steps give them: of a number some models drop the other rows before their end.
            logits_to_keep=torch.tensor([_NUM_ROWS - 1], device=device),
            plan=probe,
        )
    except ConfigError as error:
        raise ConfigError(
            f"{type(module).__name__} cannot be served: {error.message}", param="model"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"{type(module).__name__} cannot be served: its forward wants a package: {error}; "
            "install it",
            param="model",
        ) from error
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise ConfigError(
            f"{type(module).__name__} cannot be served: its forward does not accept a paged step: "
            f"{error}",
            param="model",
        ) from error
    finally:
        module.set_attn_implementation(IMPLEMENTATION)
    found = sorted(probe.layers)
    if not found or found != list(range(len(found))):
        raise ConfigError(
            f"{type(module).__name__} cannot be served: only its layers {found} attend through "
            "transformers' AttentionInterface; all must",
            param="model",
        )
    return tuple(probe.layers[index] for index in found)


def _mask(
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    """The window as an int64[1, 1, 1, 1], 0 for none, after a look at the mask it stands for."""
    positions = torch.arange(_NUM_ROWS, device=device)
    rows, keys = positions[:, None], positions[None, :]
    expected = keys <= rows
    if local_size is not None:
        expected &= rows - keys < local_size
    zero = torch.zeros((), dtype=torch.int64, device=device)
    found = mask_function(zero, zero, rows, keys)
    if not torch.equal(found.expand_as(expected), expected):
        raise _refusal("its attention mask is neither causal nor a sliding window")
    return torch.full((1, 1, 1, 1), local_size or 0, dtype=torch.int64, device=device)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    plan: Probe | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of the probe."""
    if plan is None:
        raise _refusal("it does not pass keyword arguments through to its attention")
    window = sliding_window
    if attention_mask is not None:
        if attention_mask.dtype != torch.int64 or attention_mask.numel() != 1:
            raise _refusal("it alters its attention mask from layer to layer")
        window = int(attention_mask) or None
    if isinstance(module, latent.LatentAttention):
        query = module.to_latents(query)
    plan.note(module, query.shape, key, value, window)
    found = query.transpose(1, 2).contiguous()
    if isinstance(module, latent.LatentAttention):
        found = module.to_values(found)
    return found, None


def _refusal(reason: str) -> ConfigError:
    return ConfigError(reason, param="model")
