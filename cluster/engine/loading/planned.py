"""The memory that a model will take, by its configuration: before its weights are loaded, or here.

Parameters are counted on transformers' own modules, which are built without memory for them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from operator import mul
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cluster.config.schema import EngineConfig
from cluster.engine.cpu.narrow import LINEAR_SHARE
from cluster.engine.cpu.packed_linear import plain_share
from cluster.engine.device import resolve_device, resolve_dtype
from cluster.engine.graphs.forward import may_have_graphs
from cluster.engine.loading.few_bits import ROUNDED_BITS, may_stay_narrow
from cluster.engine.loading.inspection import Description, check_packages
from cluster.engine.loading.model_config import cached_layers
from cluster.engine.memory.kv_cache import layer_groups
from cluster.engine.memory.pool_sizes import (
    derive_num_pages,
    derive_num_states,
    gpu_share,
    state_bytes,
    wanted_states,
)
from cluster.engine.memory.reserve import ForwardBytes, num_logit_rows, reserve
from cluster.engine.types import LayerSpec
from cluster.errors import ConfigError
from cluster.models.experts import unstacked
from cluster.models.weights import PICKLED, SAFETENSORS
from cluster.records import frozen

# Bits of a weight, where a method has one number of them and its configuration does not say it.
# mxfp4 has a scale of 8 bits for each 32 weights.
_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "awq": 4.0, "gptq": 4.0}
# Of a row while a layer's products are made: hidden states, and inside both factors and their
# product.
_NUM_STATES, _NUM_INNER = 4, 3
# Of the delta rule: a text's matrix, with those that the next is made of, and float32 keys of its
# rows and of the page before them, with what is made of these.
_NUM_COPIES, _NUM_LINES = 4, 5
_STATED = {"load_in_8bit": 8, "load_in_4bit": 4}


@frozen
class Planned:
    """The memory that an engine will take, in bytes.

    weights: of all ranks.  rank_weights: of the fullest one.  kv_per_token: of all ranks, every
    layer that attends taken for one without a window; convolutions keep a few tokens of a text.
    kv_cache: at most; 0 = as much as a GPU has left.  states: of layers that keep a matrix of all
    tokens before.
    logit_rows: the most of a step that are drawn from.  steps: what the largest step takes on a
    GPU, with the logits that it draws from.  graphs: what CUDA graphs take there.
    """

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


@frozen
class _Parameter:
    """count: of numbers.  is_split: between ranks, by transformers' plan; else each has all."""

    count: int
    is_split: bool


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
    device = resolve_device(config.device) if is_here else None
    stored = getattr(described.text_config, "dtype", None) or torch.float32
    dtype = _dtype(config, stored, device, described)
    method = config.quantization or getattr(described.config, "quantization_config", None)
    is_widened = is_here and bool(check_packages(described, config))
    weights = 0
    if not config.is_rounded and not is_widened:
        weights = _stored_bytes(folder) * dtype.itemsize // stored.itemsize
    rank_share = 1.0
    if not weights or config.tensor_parallel > 1:
        found = _parameters(described, config)
        weights = weights or _bytes(found, None if is_widened else method, config, dtype)
        ranks = config.tensor_parallel
        of_rank = sum(each.count // (ranks if each.is_split else 1) for each in found.values())
        rank_share = of_rank / sum(each.count for each in found.values())
    layers = cached_layers(described.text_config, dtype)
    groups = layer_groups(layers, config.page_size)
    lasting = sum(group.bytes_per_page() for group in groups if not group.kernel)
    kv_cache, states = 0, wanted_states(config, layers) * state_bytes(layers)
    if config.num_pages or (device is not None and device.type == "cpu"):
        num_pages = derive_num_pages(config, layers, described.max_context_len, 0)
        kv_cache = sum(map(mul, num_pages, (group.bytes_per_page() for group in groups)))
        states = derive_num_states(config, layers, 0) * state_bytes(layers)
    drawn, vocab_size = num_logit_rows(config, logit_rows), described.vocab_size
    forward = forward_bytes(described.text_config, vocab_size, dtype, config.tensor_parallel)
    gathered = gathered_bytes(config, layers)
    kept = reserve(
        config,
        vocab_size,
        drawn,
        lambda *counts: forward(*counts) + gathered,
        in_graphs=may_have_graphs(config, layers) and config.device_map is None,
    )
    rank_weights = int(weights * rank_share)
    return Planned(
        weights,
        rank_weights,
        lasting // config.page_size,
        kv_cache,
        states,
        drawn,
        kept.steps,
        kept.graphs,
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


def gathered_bytes(config: EngineConfig, layers: Sequence[LayerSpec]) -> int:
    """An estimate of what the delta rule takes in a layer of the widest step; 0 without one."""
    num_rows = config.max_batch_tokens
    num_texts = min(config.max_running_sequences, num_rows)
    num_lines = _NUM_LINES * (num_texts * config.page_size + num_rows)
    return max(
        _NUM_COPIES * num_texts * each.state_bytes + num_lines * each.state_bytes // each.state[-1]
        if each.state
        else 0
        for each in layers
    )


def _dtype(
    config: EngineConfig,
    stored: torch.dtype,
    device: torch.device | None,
    described: Description,
) -> torch.dtype:
    if device is None and config.dtype == "auto":
        return stored
    if (
        device is not None
        and may_stay_narrow(config, device, described.config)
        and plain_share(unstacked(bare_module(described))) >= LINEAR_SHARE
    ):
        return torch.bfloat16
    found = resolve_dtype(config.dtype, device or torch.device("cuda"), stored)
    return stored if isinstance(found, str) else found


def _stored_bytes(folder: Path) -> int:
    files = next(filter(None, (list(folder.glob(each)) for each in (SAFETENSORS, PICKLED))), [])
    return sum(path.stat().st_size for path in files)


def _parameters(described: Description, config: EngineConfig) -> dict[str, _Parameter]:
    """All parameters by name, tied ones once."""
    module = bare_module(described)
    split = {name for name, how in (module.tp_plan or {}).items() if "replicated" not in how}
    return {
        name: _Parameter(parameter.numel(), is_split=bool(split & _patterns(name)))
        for name, parameter in module.named_parameters()
    }


def bare_module(described: Description) -> Any:
    """Build transformers' model without memory for its weights; raises ConfigError where that
    cannot be."""
    try:
        with torch.device("meta"):
            # transformers writes the dtype into the configuration that it is given.
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(described.text_config), dtype=torch.float32, trust_remote_code=False
            )
    except (OSError, ValueError, ImportError, RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{described.architecture} cannot be built from its configuration: {error}",
            param="model",
        ) from error


def _patterns(name: str) -> set[str]:
    """A plan's possible names for a parameter: its own or its module's, for all layers at once."""
    general = re.sub(r"\.\d+(?=\.)", ".*", name)
    return {general, general.rpartition(".")[0]}


def _bytes(
    found: dict[str, _Parameter], method: Any, config: EngineConfig, dtype: torch.dtype
) -> int:
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
        each.count
        for name, each in found.items()
        if ".layers." in name and not any(fnmatch(name, f"{module}*") for module in wide)
    )
    others = sum(each.count for each in found.values()) - in_few
    return int(in_few * bits // 8) + others * dtype.itemsize


def _bits(method: dict[str, Any], otherwise: int) -> float:
    stated = [bits for name, bits in _STATED.items() if method.get(name)]
    named = _BITS.get(str(method.get("quant_method")), otherwise)
    return float(method.get("bits") or next(iter(stated), named))
