"""LoRA adapters over a loaded model: each row of a step gets what its own adapter adds.

The model's layers stay as they are, for rows without an adapter and for the paths that know none.
During a step that has adapters, hooks add to the layers' outputs, for the rows of each adapter
together.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from cluster.engine.cpu.layers import NativeMLP
from cluster.engine.loading.peft_folder import AdapterFolder, LowRank, refused
from cluster.engine.paths import StepInputs
from cluster.errors import NotFoundError
from cluster.records import record

log = logging.getLogger(__name__)


@record
class _Site:
    """A linear layer of the model, or its part of a product of several.

    start: the first of its columns in the product.  is_output: it is given the rows alone whose
    logits are wanted.
    """

    product: torch.nn.Module
    start: int
    in_features: int
    out_features: int
    is_output: bool


@record
class Adapter:
    """An adapter that lies in memory.

    reference: its name, "@" and the digest of its content.  parts: by the names of the layers.
    """

    reference: str
    parts: Mapping[str, tuple[_Site, LowRank]]


class Adapters:
    """The adapters of one model at one moment; never changed, only replaced.

    Index 0 means none.  An index stands for one content and is never given to another, so what was
    cached for it is never taken for another's.
    """

    def __init__(self, loaded: Mapping[int, Adapter], served: Mapping[str, int]) -> None:
        """loaded: by index.  served: those that new requests may name; the others are in memory
        for requests that run."""
        self.loaded, self.served = loaded, served
        # By the layer: the pairs of those that have one there.
        self._sites: dict[str, tuple[_Site, dict[int, LowRank]]] = {}
        for index, adapter in self.loaded.items():
            for layer, (site, pair) in adapter.parts.items():
                self._sites.setdefault(layer, (site, {}))[1][index] = pair

    def __contains__(self, index: object) -> bool:
        return index == 0 or index in self.loaded

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.served)

    @property
    def references(self) -> tuple[str, ...]:
        """The references of the adapters that are served."""
        return tuple(self.loaded[index].reference for index in self.served.values())

    @property
    def dropped(self) -> frozenset[int]:
        """The adapters in memory that are served no more."""
        return frozenset(self.loaded.keys() - self.served.values())

    def index_of(self, adapter: str) -> int:
        """By a reference, or by a name that is served; "" = 0.  Raises NotFoundError.

        A reference finds its content or nothing: what began with one does not go on with another.
        """
        if not adapter:
            return 0
        name, _, digest = adapter.partition("@")
        if not digest and name in self.served:
            return self.served[name]
        for index, each in self.loaded.items():
            if each.reference == adapter:
                return index
        if name in self.served:
            raise NotFoundError(
                f"adapter {name!r} has been replaced since the request came; send it again"
            )
        known = ", ".join(self.served) or "none"
        raise NotFoundError(f"the target serves no adapter {name[:128]!r}; adapters: {known}")

    @contextmanager
    def applied(self, inputs: StepInputs) -> Iterator[None]:
        """Inside the context the model's layers add the products of the rows' adapters."""
        assert inputs.adapters is not None, "a step without adapters was sent here"
        rows = _rows_of(inputs.adapters)
        wanted = _rows_of(inputs.adapters[inputs.logit_rows])
        with ExitStack() as hooks:
            for site, pairs in self._sites.values():
                hook = _hook(site, pairs, wanted if site.is_output else rows)
                if hook is not None:
                    hooks.enter_context(site.product.register_forward_hook(hook))
            yield


class AdapterShelf:
    """The adapters of one model, to be read as `current`, by requests in whichever thread.

    One thread loads (`serve`) while another one steps and lets go (`drop_unused`).
    """

    def __init__(self, module: Any) -> None:
        self.current = Adapters({}, {})
        self._module = module
        self._last_index = 0
        self._lock = threading.Lock()  # held while `current` is replaced, never while one is read

    def serve(self, found: Mapping[str, AdapterFolder]) -> None:
        """Serve these by their names and no others, to requests that come from now on.

        What was loaded with the same name and content stays as it is.  Raises ConfigError for one
        that does not fit; then nothing has changed."""
        references = {name: f"{name}@{folder.digest}" for name, folder in found.items()}
        is_served = set(self.current.references)
        fitted = {
            name: Adapter(references[name], _parts(self._module, name, folder.pairs))
            for name, folder in found.items()
            if references[name] not in is_served
        }
        with self._lock:
            loaded = dict(self.current.loaded)
            known = {each.reference: index for index, each in loaded.items()}
            served: dict[str, int] = {}
            for name, reference in references.items():
                if reference not in known:
                    self._last_index += 1
                    known[reference] = self._last_index
                    loaded[self._last_index] = fitted[name]
                served[name] = known[reference]
            self.current = Adapters(loaded, served)

    def drop_unused(self, used: Collection[int]) -> None:
        """Free those that are served no more, but for the indices that requests run with."""
        with self._lock:
            freed = self.current.dropped.difference(used)
            if freed:
                kept = {i: each for i, each in self.current.loaded.items() if i not in freed}
                self.current = Adapters(kept, self.current.served)
                log.info("adapters freed count=%d", len(freed))


def _rows_of(adapters: torch.Tensor) -> dict[int, torch.Tensor]:
    """The rows of each adapter that has some: int64[its rows]."""
    indices = [index for index in torch.unique(adapters).tolist() if index]
    return {index: torch.nonzero(adapters == index).flatten() for index in indices}


def _hook(site: _Site, pairs: Mapping[int, LowRank], rows: Mapping[int, torch.Tensor]) -> Any:
    """Adds to the product's output, in place; None where no row has an adapter of this layer."""
    added = [(rows[index], pair) for index, pair in pairs.items() if index in rows]
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


def _parts(
    module: Any, name: str, pairs: Mapping[str, LowRank]
) -> dict[str, tuple[_Site, LowRank]]:
    """The site where each pair is added; raises ConfigError for an adapter that does not fit."""
    found: dict[str, tuple[_Site, LowRank]] = {}
    for layer, pair in pairs.items():
        site = _fitting(module, name, layer, pair)
        found[layer] = site, _placed(name, layer, pair, site)
    return found


def check_fits(module: Any, found: Mapping[str, AdapterFolder]) -> None:
    """Raise ConfigError for an adapter of another model.  module: needs no memory for weights."""
    for name, folder in found.items():
        for layer, pair in folder.pairs.items():
            _fitting(module, name, layer, pair)


def _fitting(module: Any, name: str, layer: str, pair: LowRank) -> _Site:
    """The site of a pair in the model; raises ConfigError where there is none of its size."""
    if ".experts." in f".{layer}.":
        raise refused(name, f"layer {layer!r} is an expert's, which sees some of the rows only")
    parent_name, _, last = layer.rpartition(".")
    try:
        parent = module.get_submodule(parent_name)
        if isinstance(parent, NativeMLP):
            site = _Site(*parent.part(last), is_output=False)
        elif last == "kv_b_proj" and hasattr(parent, "expand_kv"):
            raise refused(name, f"layer {layer!r} is multiplied into queries, not run with rows")
        else:
            own = getattr(parent, last)
            is_output = own is module.get_output_embeddings()
            site = _Site(own, 0, int(own.in_features), int(own.out_features), is_output)
    except (AttributeError, KeyError) as error:
        raise refused(
            name, f"the model has no linear layer {layer!r}; it is another model's adapter"
        ) from error
    found = (pair.down.shape[1], pair.up.shape[0])
    if found != (site.in_features, site.out_features):
        raise refused(
            name,
            f"layer {layer!r} takes {site.in_features} numbers to {site.out_features}, the adapter "
            f"{found[0]} to {found[1]}; it is another model's adapter",
        )
    return site


def _placed(name: str, layer: str, pair: LowRank, site: _Site) -> LowRank:
    """The pair on its layer's device, in the layer's number format."""
    weight: torch.Tensor = site.product.weight  # type: ignore[assignment]
    if weight.device.type == "meta":
        raise refused(name, f"layer {layer!r} is offloaded; give the whole model a device")
    # On a CPU our kernels widen what is kept in bfloat16.
    is_float = weight.device.type != "cpu" and weight.dtype.is_floating_point
    dtype = weight.dtype if is_float else torch.float32
    return LowRank(*(each.to(weight.device, dtype) for each in (pair.down, pair.up)))
