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
from cluster.engine.attention.path_layers import PathConvolution, PathDelta, adopt
from cluster.engine.attention.seam import IMPLEMENTATION, tree_paged
from cluster.engine.loading.model_config import cached_layers
from cluster.engine.types import AttentionOptions, LayerSpec
from cluster.errors import ConfigError

_IMPLEMENTATION = "tree_paged_probe"
_NUM_ROWS = 4


class Probe:
    """A plan that takes notes of the layers it is shown; the forward's result is of no use.

    window, is_latent: of the layer that attends next."""

    def __init__(self, text_config: Any) -> None:
        self.layers: dict[int, LayerSpec] = {}
        self.window: int | None = None
        self.is_latent = False
        self._text_config = text_config
        # By layer; a layer that is given the very keys of another has none of its own.
        self._keys: dict[int, weakref.ref[torch.Tensor]] = {}

    def attend_layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
            raise _refusal(
                f"keys and values of layer {layer} differ in shape ({list(key.shape)} and "
                f"{list(value.shape)})"
            )
        own = LayerSpec(key.shape[1], key.shape[3], key.dtype, key.device, self.window)
        if self.is_latent:
            own = replace(own, head_dim=own.head_dim // 2, is_latent=True)
        owner = next((each for each, other in self._keys.items() if other() is key), None)
        if owner is None:
            self._keys[layer] = weakref.ref(key)
        self._add(layer, replace(own, shared_with=owner))
        return query.transpose(1, 2)

    def convolve_layer(
        self, layer: int, states: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Of a convolution alone, or of a delta layer's."""
        own = cached_layers(self._text_config, states.dtype)[layer]
        self._add(layer, replace(own, device=states.device))
        return states

    def delta_layer(self, layer: int, *rows: torch.Tensor) -> torch.Tensor:
        """The layer's convolution has been noted before."""
        _, _, value, *_ = rows
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
    probe = Probe(module.config.get_text_config(decoder=True))
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
        raise _refused(module, error.message) from error
    except ImportError as error:
        reason = f"its forward wants a package: {error}; install it"
        raise _refused(module, reason) from error
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        reason = f"its forward does not accept a paged step: {error}"
        raise _refused(module, reason) from error
    finally:
        module.set_attn_implementation(IMPLEMENTATION)
    found = sorted(probe.layers)
    if not found or found != list(range(len(found))):
        raise _refused(
            module,
            f"only its layers {found} attend through transformers' AttentionInterface; all must",
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
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of the probe: that of steps, behind a look at the window."""
    window = sliding_window
    if attention_mask is not None:
        if attention_mask.dtype != torch.int64 or attention_mask.numel() != 1:
            raise _refusal("it alters its attention mask from layer to layer")
        window = int(attention_mask) or None
    if plan is not None:
        plan.window, plan.is_latent = window, isinstance(module, latent.LatentAttention)
    return tree_paged(module, query, key, value, None, plan=plan, **rest)


def _refused(module: Any, reason: str) -> ConfigError:
    return _refusal(f"{type(module).__name__} cannot be served: {reason}")


def _refusal(reason: str) -> ConfigError:
    return ConfigError(reason, param="model")
