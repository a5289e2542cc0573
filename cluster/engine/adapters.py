"""LoRA adapters over a loaded model: each row of a step gets what its own adapter adds.

The model's layers stay as they are, for rows without an adapter and for the paths that know none.
During a step that has adapters, hooks add to the layers' outputs, for the rows of each adapter
together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from cluster.engine.attention.seam import LayerPlan
from cluster.engine.cpu.layers import NativeMLP
from cluster.engine.loading.peft_folder import LowRank, refused
from cluster.engine.paths import StepInputs
from cluster.engine.types import AttentionOptions


@dataclass(frozen=True, slots=True, eq=False)
class _Site:
    """A linear layer of the model, or its part of a product of several.

    start: the first of its columns in the product.  is_output: it is given the rows alone whose
    logits are wanted.  pairs: by the index of the adapter.
    """

    product: torch.nn.Module
    start: int
    in_features: int
    out_features: int
    is_output: bool
    pairs: dict[int, LowRank] = field(default_factory=dict)


class Adapters:
    """Of one model; index 0 means none, adapter `names[i]` has the index i + 1."""

    def __init__(self, module: Any, adapters: Mapping[str, Mapping[str, LowRank]]) -> None:
        """adapters: as read from their folders.  Raises ConfigError for one that does not fit."""
        self.names = tuple(adapters)
        sites: dict[str, _Site] = {}
        for index, (name, pairs) in enumerate(adapters.items(), 1):
            for layer, pair in pairs.items():
                if layer not in sites:
                    sites[layer] = _site(module, name, layer)
                sites[layer].pairs[index] = _fitted(name, layer, pair, sites[layer])
        self._sites = tuple(sites.values())

    @contextmanager
    def applied(self, inputs: StepInputs) -> Iterator[None]:
        """Inside of the context the model's layers add what the rows' adapters say."""
        assert inputs.adapters is not None, "a step without adapters was sent here"
        rows = _rows_of(inputs.adapters)
        wanted = _rows_of(inputs.adapters[inputs.logit_rows])
        hooks = []
        try:
            for site in self._sites:
                hook = _hook(site, wanted if site.is_output else rows)
                if hook is not None:
                    hooks.append(site.product.register_forward_hook(hook))
            yield
        finally:
            for each in hooks:
                each.remove()


class LayerByLayer:
    """A step's plan for the layers' own code: native layers, which know no adapters, leave it."""

    def __init__(self, plan: LayerPlan) -> None:
        self._plan = plan

    def attend_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:  # fmt: skip
        return self._plan.attend_layer(layer, query, key, value, options)


def _rows_of(adapters: torch.Tensor) -> dict[int, torch.Tensor]:
    """The rows of each adapter that has some: int64[its rows]."""
    indices = [index for index in torch.unique(adapters).tolist() if index]
    return {index: torch.nonzero(adapters == index).flatten() for index in indices}


def _hook(site: _Site, rows: Mapping[int, torch.Tensor]) -> Any:
    """Adds to the product's output, in place; None where no row has an adapter of this layer."""
    added = [(rows[index], pair) for index, pair in site.pairs.items() if index in rows]
    if not added:
        return None
    columns = slice(site.start, site.start + site.out_features)

    def hook(product: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        hidden = args[0][0]  # [rows, in_features]
        for chosen, pair in added:
            chosen = chosen.to(hidden.device)
            taken = hidden.index_select(0, chosen).to(pair.down.dtype)
            sums = taken @ pair.down.T @ pair.up.T
            output[0, :, columns].index_add_(0, chosen, sums.to(output.dtype))

    return hook


def _site(module: Any, name: str, layer: str) -> _Site:
    """Where the model has that layer; raises ConfigError where it has none."""
    if ".experts." in f".{layer}.":
        raise refused(name, f"layer {layer!r} is an expert's, which sees some of the rows only")
    parent_name, _, last = layer.rpartition(".")
    try:
        parent = module.get_submodule(parent_name)
        if isinstance(parent, NativeMLP):
            return _Site(*parent.part(last), is_output=False)
        found = getattr(parent, last)
        sizes = int(found.in_features), int(found.out_features)
    except (AttributeError, KeyError) as error:
        raise refused(
            name, f"the model has no linear layer {layer!r}; it is another model's adapter"
        ) from error
    return _Site(found, 0, *sizes, is_output=found is module.get_output_embeddings())


def _fitted(name: str, layer: str, pair: LowRank, site: _Site) -> LowRank:
    """The pair where its layer computes, in the numbers that it computes with."""
    found = (pair.down.shape[1], pair.up.shape[0])
    if found != (site.in_features, site.out_features):
        raise refused(
            name,
            f"layer {layer!r} takes {site.in_features} numbers to {site.out_features}, the adapter "
            f"{found[0]} to {found[1]}; it is another model's adapter",
        )
    weight: torch.Tensor = site.product.weight  # type: ignore[assignment]
    if weight.device.type == "meta":
        raise refused(name, f"layer {layer!r} is offloaded; give the whole model a device")
    # On a CPU our kernels widen what is kept in bfloat16.
    is_float = weight.device.type != "cpu" and weight.dtype.is_floating_point
    dtype = weight.dtype if is_float else torch.float32
    return LowRank(*(each.to(weight.device, dtype) for each in (pair.down, pair.up)))
