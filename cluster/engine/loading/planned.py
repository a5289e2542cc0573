"""The memory that a model will take, by its configuration: before its weights are loaded, or here;
and the wait for it.

Parameters are counted on transformers' own modules, which are built without memory for them.  On a
CPU weights take another space than the files: our kernels keep linear layers in bfloat16 or in few
bits, with an own copy of an output layer that shares the embedding's weight, and embeddings in
bfloat16.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from operator import mul
from pathlib import Path
from typing import Any

import torch

from cluster.config.schema import EngineConfig
from cluster.engine.cpu import kernels
from cluster.engine.cpu.narrow import LINEAR_SHARE, ROUNDED_BITS, may_stay_narrow, wanted_format
from cluster.engine.cpu.packed_linear import plain_share
from cluster.engine.device import resolve_device, resolve_dtype
from cluster.engine.loading.inspection import Description, check_packages
from cluster.engine.loading.model_config import cached_layers, quantised_by, without_weights
from cluster.engine.memory.kv_cache import layer_groups
from cluster.engine.memory.pool_sizes import (
    ForwardBytes,
    Reserve,
    derive_num_pages,
    derive_num_states,
    gpu_share,
    num_logit_rows,
    reserve,
    state_bytes,
    wanted_states,
)
from cluster.errors import ConfigError
from cluster.models.experts import unstacked
from cluster.models.resolve import resolve
from cluster.models.weights import GROUPED, header_of, stored_bytes
from cluster.records import frozen

# Bits of a weight, where a method has one number of them and its configuration does not say it.
# mxfp4 has a scale of 8 bits for each 32 weights.
_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "awq": 4.0, "gptq": 4.0}
# Of a row while a layer's products are made: hidden states, and inside both factors and their
# product.
_NUM_STATES, _NUM_INNER = 4, 3
_STATED = {"load_in_8bit": 8, "load_in_4bit": 4}
# As configurations call the experts of a layer, and those that a token is sent to.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_NUM_CHOSEN = ("num_experts_per_tok", "top_k_experts")
# What an engine takes beside weights and cache on a CPU once it has made steps of all sizes: the
# libraries' threads and buffers, rows of activations, and what the allocator keeps.
# docs/plan.md has the measurements.
_WORKING_BYTES = 96 * 1024 * 1024


@frozen
class Planned:
    """The memory that an engine will take, in bytes.

    active: the share of the parameters that one token needs: of experts, those to which it is sent.
    weights: of all ranks.  rank_weights: of the fullest one.  kv_per_token: of all ranks, every
    layer that attends taken for one without a window; convolutions keep a few tokens of a text.
    kv_cache: at most; 0 = as much as a GPU has left.  states: of layers that keep a matrix of all
    tokens before.
    logit_rows: the most of a step that are drawn from.  steps: what the largest step takes, with
    the logits that it draws from.  graphs: what CUDA graphs take.
    """

    num_parameters: int
    active: float
    weights: int
    rank_weights: int
    kv_per_token: int
    kv_cache: int
    states: int
    logit_rows: int
    steps: int
    graphs: int

    @property
    def beside(self) -> int:
        """What a GPU needs beside the weights and the KV cache."""
        return self.steps + self.graphs + self.states

    def share(self, config: EngineConfig) -> float:
        """The share of a GPU's memory that may be in use with the KV cache."""
        return gpu_share(config)

    def room(self, config: EngineConfig, gpu_bytes: float, num_gpus: int = 1) -> int:
        """Tokens of KV that GPUs of that size hold beside the weights, each its rank's.

        num_gpus: between which a device map divides one rank's layers; each takes part in steps."""
        left = num_gpus * (gpu_bytes * gpu_share(config) - self.steps - self.graphs)
        left -= self.rank_weights + self.states
        return max(0, int(left * config.tensor_parallel) // self.kv_per_token)


def planned(
    folder: Path,
    described: Description,
    config: EngineConfig,
    *,
    is_here: bool,
    logit_rows: int | None = None,
) -> Planned:
    """folder: of its config.json, and of the weights, where there are any.  is_here: the engine is
    to run on this machine, so its device is known.  logit_rows: as in `num_logit_rows`."""
    device = resolve_device(config.device) if is_here or config.device == "cpu" else None
    on_cpu = device is not None and device.type == "cpu"
    stored = getattr(described.text_config, "dtype", None) or torch.float32
    method, ranks = quantised_by(described.config, config), config.tensor_parallel
    module = bare_module(described)
    found = {name: each.numel() for name, each in module.named_parameters()}  # tied ones once
    num_parameters = sum(found.values())
    # The parameters that ranks have a part of, by transformers' plan; of others each has all.
    split = {name for name, how in (module.tp_plan or {}).items() if "replicated" not in how}
    of_rank = sum(
        count // ranks if split & _patterns(name) else count for name, count in found.items()
    )
    if device is not None and on_cpu and method is None and ranks == 1:
        dtype, weights = _on_cpu(folder, unstacked(module), described, config, device)
    else:
        is_widened = is_here and bool(check_packages(described, config))
        dtype = resolve_dtype(config.dtype, device or torch.device("cuda"), stored) or stored
        weights = 0
        if not config.is_rounded and not is_widened:
            weights = stored_bytes(folder) * dtype.itemsize // stored.itemsize
        weights = weights or _bytes(found, None if is_widened else method, config, dtype)
    layers = cached_layers(described.text_config, dtype)
    groups = layer_groups(layers, config.page_size)
    lasting = sum(group.bytes_per_page() for group in groups if not group.kernel)
    kv_cache, states = 0, wanted_states(config, layers) * state_bytes(layers)
    if config.num_pages or on_cpu:
        num_pages = derive_num_pages(config, layers, described.max_context_len, 0)
        kv_cache = sum(map(mul, num_pages, (group.bytes_per_page() for group in groups)))
        states = derive_num_states(config, layers, 0) * state_bytes(layers)
    drawn, vocab_size = num_logit_rows(config, logit_rows), described.vocab_size
    kept = Reserve(_WORKING_BYTES)
    if not on_cpu:
        kept = reserve(
            config,
            layers,
            vocab_size,
            drawn,
            forward_bytes(described.text_config, vocab_size, dtype, ranks),
            on_one_gpu=config.device_map is None,
        )
    return Planned(
        num_parameters=num_parameters,
        active=1.0 - _idle(found, described.text_config) / num_parameters,
        weights=weights,
        rank_weights=weights * of_rank // num_parameters,
        kv_per_token=lasting // config.page_size,
        kv_cache=kv_cache,
        states=states,
        logit_rows=drawn,
        steps=kept.steps,
        graphs=kept.graphs,
    )


def forward_bytes(
    text_config: Any, vocab_size: int, dtype: torch.dtype, ranks: int
) -> ForwardBytes:
    """An estimate: of a row its hidden states and those inside one layer; or its logits, which are
    made in the model's format and then brought to float32."""
    hidden = int(text_config.hidden_size)
    inner = getattr(text_config, "intermediate_size", None) or 4 * hidden
    widest = int(max(inner) if isinstance(inner, list) else inner)
    of_row = (_NUM_STATES * hidden + _NUM_INNER * widest // ranks) * dtype.itemsize
    of_logits = vocab_size * (dtype.itemsize + torch.float32.itemsize)
    return lambda num_rows, num_logits: max(num_rows * of_row, num_logits * of_logits)


def bare_module(described: Description) -> Any:
    """Build transformers' model without memory for its weights; raises ConfigError where that
    cannot be."""
    try:
        return without_weights(described.text_config, dtype=torch.float32)
    except (OSError, ValueError, ImportError, RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{described.architecture} cannot be built from its configuration: {error}",
            param="model",
        ) from error


def _patterns(name: str) -> set[str]:
    """A plan's possible names for a parameter: its own or its module's, for all layers at once."""
    general = re.sub(r"\.\d+(?=\.)", ".*", name)
    return {general, general.rpartition(".")[0]}


def _idle(found: Mapping[str, int], text_config: Any) -> float:
    """The parameters of experts that a token is not sent to."""
    in_experts = sum(count for name, count in found.items() if ".experts." in name)
    if not in_experts:
        return 0.0
    chosen, count = (
        next(int(getattr(text_config, name)) for name in names if getattr(text_config, name, None))
        for names in (_NUM_CHOSEN, _NUM_EXPERTS)
    )
    return in_experts * (1.0 - chosen / count)


def _bytes(found: Mapping[str, int], method: Any, config: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes of parameters that are not stored so; a quantised model's layers have fewer bits.

    method: of quantisation, None = of none."""
    bits: float = 8 * dtype.itemsize
    wide: Sequence[str] = ()
    if method is not None:
        bits = _bits(dict(method), 8 * dtype.itemsize)
        # Latent attention multiplies this layer from either side (`attention/latent.py`).
        wide = [*(dict(method).get("modules_to_not_convert") or ()), "*.kv_b_proj."]
    elif config.is_rounded:
        bits = ROUNDED_BITS[config.weights]
    in_few = sum(
        count
        for name, count in found.items()
        if ".layers." in name and not any(fnmatch(name, f"{module}*") for module in wide)
    )
    others = sum(found.values()) - in_few
    return int(in_few * bits // 8) + others * dtype.itemsize


def _bits(method: dict[str, Any], otherwise: int) -> float:
    stated = [bits for name, bits in _STATED.items() if method.get(name)]
    named = _BITS.get(str(method.get("quant_method")), otherwise)
    return float(method.get("bits") or next(iter(stated), named))


def _on_cpu(
    folder: Path, module: Any, described: Description, config: EngineConfig, device: torch.device
) -> tuple[torch.dtype, int]:
    """The format in which a model's numbers are computed here, and the bytes of its weights.

    module: whose experts stand one by one."""
    stored = getattr(described.text_config, "dtype", None) or torch.float32
    is_plain = plain_share(module) >= LINEAR_SHARE
    is_narrow = is_plain and may_stay_narrow(config, device, described.config)
    dtype = torch.bfloat16 if is_narrow else resolve_dtype(config.dtype, device, stored) or stored
    others: float = dtype.itemsize
    linear, groups = others, dict[str, int]()
    if kernels.load() is not None and is_plain:
        if stored == torch.bfloat16:
            linear = torch.bfloat16.itemsize
        if is_narrow:
            format = wanted_format(folder, config)
            linear = ROUNDED_BITS.get(format, 8 * linear) / 8
            groups = _group_bytes(folder) if format == "stored" else {}
    # An embedding that scales its rows stays in float32 beside our kernels.
    scaled = torch.float32.itemsize if is_narrow else others
    total, counted = 0.0, set()
    for name, layer in module.named_modules():
        if type(layer) is torch.nn.Linear:
            counted.add(f"{name}.weight")
            total += groups.get(name, layer.weight.numel() * linear)
        elif isinstance(layer, torch.nn.Embedding) and type(layer) is not torch.nn.Embedding:
            counted.add(f"{name}.weight")
            total += layer.weight.numel() * scaled
    named = module.named_parameters()
    return dtype, int(total + others * sum(e.numel() for name, e in named if name not in counted))


def _group_bytes(folder: Path) -> dict[str, int]:
    """The bytes of each layer's weight in a file of groups."""
    groups: dict[str, int] = {}
    for name, header in header_of(folder / GROUPED).items():
        start, end = header["data_offsets"]
        layer = name.rpartition(".")[0]
        groups[layer] = groups.get(layer, 0) + int(end) - int(start)
    return groups


# Waits for the memory of a GPU that a process before this one still holds.
#
# A replica that takes another's place is raised beside it while it ends; what it had is free a
# moment later.

log = logging.getLogger(__name__)

# A process that is ended with gigabytes of pinned memory takes some seconds.
_PATIENCE_S = 60.0
_STEP_S = 0.5


def await_room(
    config: EngineConfig,
    memory: Callable[[torch.device], tuple[int, int]] = torch.cuda.mem_get_info,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once the model's weights have room on its GPU, or after 60 s: then loading says what
    is missing.

    memory: a device's free and total bytes."""
    device = resolve_device(config.device)
    # What several devices or fewer bits take, transformers knows alone.
    if device.type != "cuda" or config.device_map is not None or config.quantization is not None:
        return
    if config.tensor_parallel > 1:
        device = torch.device("cuda")  # the rank's own, which is the current one
    wanted = stored_bytes(resolve(config.model)) // config.tensor_parallel
    # As the KV cache is measured, which is to be more than nothing.
    left_to_others = 0.0 if config.num_pages else 1.0 - gpu_share(config)
    deadline = clock() + _PATIENCE_S

    def missing() -> float:
        free, total = memory(device)
        return wanted + left_to_others * total - free

    if (short := missing()) > 0:
        log.warning(
            "waiting for memory of the GPU, %.0f s at most device=%s missing_gb=%.1f: another "
            "process has it, which may be ending",
            _PATIENCE_S,
            device,
            short / 1e9,
        )
    while missing() > 0 and clock() < deadline:
        sleep(_STEP_S)
