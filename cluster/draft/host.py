"""The target's engine for the drafters inside it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cluster.config.schema import Config, EngineConfig
from cluster.core import TokenArray
from cluster.draft import registry
from cluster.engine.engine import Engine
from cluster.engine.first_layers import FirstLayers, part_of
from cluster.engine.graphs.capture import Capture, CudaCapture
from cluster.engine.loading.model import LoadedModel
from cluster.engine.memory.pool_sizes import gpu_share
from cluster.engine.schedule.batch import IndexArray
from cluster.engine.types import LayerSpec
from cluster.errors import ConfigError

log = logging.getLogger(__name__)

# Rows of one step of a resident on a CPU.  They suffice to grow the widest trees.  Prompts are read
# in chunks of this size, and decoding steps wait for each chunk.
_MAX_CHUNK_ROWS = 128
# Such a chunk follows one of the target's own, so it takes a smaller part of what texts wait for.
_CHUNK_SHARE = 0.25
# The share of a GPU's memory; the rest is for temporary tensors.
_MAX_GPU_SHARE = 0.97
# The last parts of the names that checkpoints give the weights which heads share with their target.
_STORED = {
    "embedding": ("embed_tokens.weight", "wte.weight", "embed_in.weight"),
    "output": ("lm_head.weight", "embed_out.weight"),
}


def layers_of(config: Config, name: str, like: LayerSpec) -> tuple[LayerSpec, ...]:
    """Return the layers of one resident; none if it cannot be made, which is reported later."""
    settings = config.drafters[name]
    try:
        options = registry.check(name, settings)
        asked = getattr(registry.drafter_class(settings.kind), "kv_layers", None)
        return tuple(asked(options, like)) if callable(asked) else ()
    except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
        log.debug("no layers for drafter name=%s error=%s", name, type(error).__name__)
        return ()


class Host:
    """The target as a drafter inside it sees it.

    caches: of the drafter's own layers, [slots, 2, kv_heads, head_dim] each.  capture: None = there
    are no graphs.
    """

    def __init__(self, engine: Engine, config: Config, drafter: str) -> None:
        model = engine.model
        counts = {name: len(layers_of(config, name, model.layers[0])) for name in config.hosted}
        before = itertools.takewhile(lambda name: name != drafter, counts)
        first = len(model.layers) + sum(counts[name] for name in before)
        self.model_hash = engine.model_hash
        self.num_layers = len(model.layers)
        self.vocab_size = engine.vocab_size
        self.device = engine.device
        self.dtype = model.layers[0].dtype
        has_graphs = engine.config.cuda_graphs and self.device.type == "cuda"
        self.capture: Capture | None = CudaCapture(self.device) if has_graphs else None
        self.hidden_size = int(model.module.config.get_text_config().hidden_size)
        # An engine that was loaded without the residents' layers has none.
        self.caches: Sequence[torch.Tensor] = engine.cache.layers[
            first : first + counts.get(drafter, 0)
        ]
        self._engine = engine
        self._first = first

    def slots(self, request_id: str) -> IndexArray:
        """The slot of each token of the request's text that the cache holds: int64[tokens].

        Of the first of `caches`; the others have the same where their windows are the same.  They
        hold until the next step.
        """
        length = self._engine.cached_len(request_id)
        return self._engine.slots(request_id, self._first)[:length]

    def token_ids(self, request_id: str) -> TokenArray:
        """The tokens in those slots: int32[tokens]."""
        return self._engine.context_ids(request_id)

    def weight(self, name: str) -> torch.Tensor:
        """The model's "embedding" or "output" weights, [vocab, hidden], which must not be changed.

        Raises ConfigError where the checkpoint does not have them in one piece."""
        model = self._engine.model
        shape = (self.vocab_size, self.hidden_size)
        # As loaded: of some configurations the weights know better.
        is_tied = bool(model.module.all_tied_weights_keys)
        if name == "embedding" or is_tied:
            held = model.module.get_input_embeddings().weight
            # With several ranks, each may hold only a part of the weight.
            if type(held) in (torch.Tensor, torch.nn.Parameter) and held.shape == shape:
                return held.detach()
            name = "embedding"
        return _stored(Path(model.source), _STORED[name], shape).to(self.device, self.dtype)

    def first_layers(self, num_layers: int, output: torch.Tensor | None) -> FirstLayers:
        """An engine of the first layers on the target's own pages.  output: [vocab, hidden], what
        it has in place of the target's output layer.

        Raises ConfigError where the model cannot be taken apart."""
        part = part_of(self._whole_model(), range(num_layers), output)
        return FirstLayers(self._engine, part)

    def _whole_model(self) -> LoadedModel:
        """Return the model, if its layers can be used separately."""
        if self._engine.config.tensor_parallel > 1:
            raise ConfigError(
                "tensor_parallel: layers of a target on several ranks cannot draft for it; remove "
                "the drafter",
                param="kind",
            )
        return self._engine.model

    def part(self, layers: Sequence[int], num_pages: int, memory_fraction: float) -> Engine:
        """An engine of these layers alone, ascending, with the model's embedding and output layer:
        with its weights, and a KV cache of its own.  num_pages, memory_fraction: as of any engine.

        Raises ConfigError where the model cannot be taken apart."""
        part, whole = part_of(self._whole_model(), layers), self._engine.config
        config = replace(whole, num_pages=num_pages, memory_fraction=memory_fraction)
        config = replace(config, **beside_target(config, self.device))
        engine = Engine(config, part)
        engine.capture_ahead()
        return engine


def beside_target(config: EngineConfig, device: torch.device) -> dict[str, Any]:
    """Return the settings of a draft model that differ in the target's process."""
    if device.type != "cuda":
        return {
            "max_batch_tokens": min(config.max_batch_tokens, _MAX_CHUNK_ROWS),
            "max_chunk_s": _CHUNK_SHARE * config.max_chunk_s,
        }
    # The draft model's share is of the memory that the target leaves free.
    free, total = torch.cuda.mem_get_info(device)
    share = 1.0 - (1.0 - gpu_share(config)) * free / total
    return {"memory_fraction": min(share, _MAX_GPU_SHARE)}


def _stored(folder: Path, names: Sequence[str], shape: tuple[int, int]) -> torch.Tensor:
    """Return the tensor of a checkpoint whose name ends with one of `names`."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as held:
            for key in held.keys():  # noqa: SIM118 - the file is no mapping
                if key.endswith(tuple(names)) and tuple(held.get_slice(key).get_shape()) == shape:
                    return held.get_tensor(key)
    raise ConfigError(
        f"{folder} has no tensor {' or '.join(names)} of {shape[0]} x {shape[1]} in safetensors, "
        "which the draft head takes from its target; use a head that brings its own",
        param="model",
    )
