"""Loads any Hugging Face causal LM, unmodified, and runs its forward on a laid-out batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from cluster.config.schema import EngineConfig
from cluster.engine.adapters import AdapterShelf
from cluster.engine.attention import backends, seam
from cluster.engine.cpu.causal_lm import NativeForward, native_forward
from cluster.engine.cpu.layers import fuse_layers
from cluster.engine.cpu.narrow import (
    are_same_experts,
    can_widen,
    check_few_bits,
    check_reproducible,
    computed_instead,
    few_bits,
    may_stay_narrow,
    multiply_narrow,
    served_weights,
)
from cluster.engine.cpu.packed_linear import choose_kernels, is_native, pack_linears
from cluster.engine.cpu.threads import divide_cores
from cluster.engine.device import (
    computes,
    convert,
    resolve_device,
    resolve_dtype,
    return_freed_memory,
    warn_of_emulation,
    warn_of_hidden_gpu,
)
from cluster.engine.loading.inspection import (
    Description,
    check_packages,
    describe,
    quantization_of,
)
from cluster.engine.loading.model_config import BAD_VALUES
from cluster.engine.loading.peft_folder import read_adapters
from cluster.engine.loading.probe import probe_layers
from cluster.engine.loading.progress import telling_of_weights
from cluster.engine.loading.renumbered import Numbering
from cluster.engine.module_forward import ModuleForward, decoder_layers
from cluster.engine.paths import StepInputs, StepOutputs
from cluster.engine.taps import resolve_taps
from cluster.engine.types import LayerSpec
from cluster.errors import ConfigError
from cluster.models.experts import unstacked
from cluster.models.fingerprint import folder_tokenizer_hash, model_hash
from cluster.models.grouped import GroupedWeight, load_int8
from cluster.models.made_for import served_hash
from cluster.models.resolve import resolve
from cluster.models.token_bytes import eos_token_ids
from cluster.records import record

if TYPE_CHECKING:
    from cluster.engine.fused.forward import FusedForward  # which imports triton

log = logging.getLogger(__name__)

_LOADING_ERRORS = (*BAD_VALUES, OSError, ImportError, SafetensorError)


@record
class LoadedModel:
    """A model ready for tree attention.

    module: the transformers model, in eval mode.  source: the folder it came from.
    layers: what each attention layer caches on this rank.  device: where inputs go.
    weights: see `served_weights`.  instead: see `computed_instead`.  numbering: of its tokens,
    None = its own.  native, fused: ways of running its forward, each of which answers None to a
    step that it is not made for; plain: the way that serves any.  adapters: those that
    works may ask for; none until some are loaded.
    """

    module: Any
    source: str
    architecture: str
    layers: tuple[LayerSpec, ...]
    device: torch.device
    vocab_size: int
    max_context_len: int
    eos_token_ids: tuple[int, ...]
    weights: str = ""
    instead: str = ""
    native: NativeForward | None = None
    fused: FusedForward | None = None
    numbering: Numbering | None = None
    adapters: AdapterShelf = field(init=False)
    plain: ModuleForward = field(init=False)

    def __post_init__(self) -> None:
        adapters = AdapterShelf(self.module)
        object.__setattr__(self, "adapters", adapters)
        plain = ModuleForward(self.module, len(self.layers), adapters)
        object.__setattr__(self, "plain", plain)

    @property
    def num_columns(self) -> int:
        """The number of its logits."""
        return self.vocab_size if self.numbering is None else self.numbering.num_columns

    def resolve_taps(self, taps: Sequence[int]) -> tuple[int, ...]:
        """The taps counted from the front; raises ConfigError for what the model has not."""
        if taps and not self.plain.has_taps:
            raise ConfigError(
                f"{self.architecture} gives no hidden states: its layers do not stand in one list, "
                "or hand on several of a token; remove the drafters that need them",
                param="taps",
            )
        return resolve_taps(taps, len(self.layers))

    def forward(self, inputs: StepInputs) -> StepOutputs:
        """Run the forward in the first way that is made for the step; adapters are for the plain
        one alone."""
        for path in (self.native, self.fused):
            if path is not None and inputs.adapters is None:
                outputs = path(inputs)
                if outputs is not None:
                    return outputs
        return self.plain(inputs)


# Returns the layers that a model's KV cache is to keep behind the model's own.
ExtraLayers = Callable[[LoadedModel], Sequence[LayerSpec]]


def load_model(
    config: EngineConfig,
    numbering: Numbering | None = None,
    *,
    beside: bool = False,
) -> LoadedModel:
    """Load `config.model`; raises ConfigError with the remedy when it cannot be served.

    numbering: of its tokens, None = its own.  beside: while another engine of the process makes
    steps."""
    seam.register()
    folder = resolve(config.model)
    described = describe(folder, config)
    found = read_adapters(config)
    text_config, max_context_len = described.text_config, described.max_context_len
    device = resolve_device(config.device)
    check_few_bits(config, device)
    is_unpacked = bool(check_packages(described, config))
    stored = getattr(text_config, "dtype", None)
    is_narrow = may_stay_narrow(config, device, described.config)
    dtype = torch.bfloat16 if is_narrow else resolve_dtype(config.dtype, device, stored)
    # transformers makes a model's numbers torch's default while it builds the model, for all
    # threads.  What is made here of float32 is the same.
    is_wide = beside and config.quantization is None
    with telling_of_weights(folder):
        first = torch.float32 if is_wide else dtype
        module = load_module(folder, described, config, device, first)
        if is_wide or is_unpacked:  # transformers leaves what it unpacks in the scales' format
            convert(module, dtype)
    if numbering is not None:
        numbering.apply(module)
    module.eval()
    module.requires_grad_(False)
    input_device = module.get_input_embeddings().weight.device
    with torch.inference_mode():
        layers = probe_layers(module, input_device)
    forward: NativeForward | None = None
    is_widened = False
    if config.tensor_parallel == 1:
        # Stacked experts stand one by one where our kernels can have them.
        unstacked(module, are_same_experts)
        is_widened = can_widen(module, config, int(text_config.num_attention_heads), layers)
        if is_narrow and not is_widened and not computes(torch.bfloat16):
            convert(module, torch.float32)
            layers = tuple(replace(each, dtype=torch.float32) for each in layers)
    fused = None if is_widened else fused_on_gpu(module, config, layers, max_context_len)
    if fused is None and config.tensor_parallel == 1:
        groups = few_bits(module, config, folder, numbering) if is_widened else None
        forward = _fused(module, config, layers, groups)
    weights = served_weights(module)
    instead = "" if weights else computed_instead(folder, config, device, is_widened=is_widened)
    if instead:
        log.warning("%s", instead)
    if device.type == "cpu":
        if config.device == "auto":
            warn_of_hidden_gpu()
        if not is_widened:
            warn_of_emulation(layers[0].dtype)
        return_freed_memory()
        divide_cores(config, is_native=is_native(module))
    if config.reproducible:
        check_reproducible(module, config, device, text_config, layers)
    loaded = LoadedModel(
        module=module,
        source=str(folder),
        architecture=type(module).__name__,
        layers=layers,
        device=torch.device(input_device),
        vocab_size=described.vocab_size,
        max_context_len=max_context_len,
        eos_token_ids=_eos_token_ids(folder, text_config),
        weights=weights,
        instead=instead,
        native=forward,
        fused=fused,
        numbering=numbering,
    )
    loaded.adapters.serve(found)
    log.info(
        "model loaded model=%s architecture=%s layers=%d device=%s dtype=%s weights=%s",
        folder,
        loaded.architecture,
        len(layers),
        loaded.device,
        layers[0].dtype,
        weights or layers[0].dtype,
    )
    return loaded


def load_module(
    folder: Path,
    described: Description,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype | None,
) -> Any:
    """transformers' module with the checkpoint's numbers; raises ConfigError with the remedy.

    dtype: None = as transformers finds it."""
    arguments: dict[str, Any] = {
        "dtype": dtype or "auto",
        "attn_implementation": seam.IMPLEMENTATION,
        "trust_remote_code": False,
        "config": described.config,
        "key_mapping": described.names,
    }
    if config.quantization is not None:
        arguments["quantization_config"] = quantization_of(config)
    if config.tensor_parallel > 1:
        from cluster.engine.parallel import distributed_config

        arguments["distributed_config"] = distributed_config(config.tensor_parallel)
    else:
        arguments["device_map"] = config.device_map or {"": device}
    try:
        state = load_int8(folder)
        if state is None:
            loader, wanted = AutoModelForCausalLM, folder
        else:
            arguments["state_dict"] = state
            # The automatic classes want a folder with weights of a kind that they know.
            loader, wanted = getattr(transformers, described.config.architectures[0]), None
        module, report = loader.from_pretrained(wanted, output_loading_info=True, **arguments)
    except _LOADING_ERRORS as error:
        raise ConfigError(
            f"model {config.model!r} cannot be loaded: {error}", param="model"
        ) from error
    absent = sorted(report["missing_keys"])
    if absent:
        # transformers would go on with random numbers in their place.
        raise ConfigError(
            f"model {config.model!r} lacks {len(absent)} of its weights, {absent[0]} among them; "
            "the checkpoint is incomplete or of another architecture",
            param="model",
        )
    return module


def fused_on_gpu(
    module: Any, config: EngineConfig, layers: Sequence[LayerSpec], max_context_len: int
) -> FusedForward | None:
    """The forward by our kernels for GPUs, where they are wanted and serve the model; not tried
    yet."""
    if backends.chosen(config.attention, layers[0].device) != "triton":
        return None
    from cluster.engine.fused.forward import fused_forward

    return fused_forward(module, layers, max_context_len)


def _fused(
    module: Any,
    config: EngineConfig,
    layers: Sequence[LayerSpec],
    groups: Mapping[str, GroupedWeight] | None,
) -> NativeForward | None:
    """Pack and fuse what our kernels or torch's libraries compute faster; returns the forward, if
    all of it is ours.

    groups: see `few_bits`; None = the model is not to be widened.
    It goes layer by layer, so that memory holds only one layer's weights twice: as they were, and
    widened or packed.
    """
    is_widened = groups is not None
    native = choose_kernels(module, only_native=config.reproducible or is_widened)
    num_fused = num_packed = 0
    repeated = None if native is None else decoder_layers(module, len(layers))
    for part in (*(repeated or ()), module):
        if is_widened:
            part.float()
        if native is not None:
            num_fused += fuse_layers(part, native)
        num_packed += pack_linears(part, native)
        if native is not None:
            return_freed_memory()
    log.info(
        "linear layers packed count=%d native=%s others fused=%d",
        num_packed,
        native is not None,
        num_fused,
    )
    if groups is not None and native is not None:
        multiply_narrow(module, native, groups, config)
    return None if native is None else native_forward(module, layers, native)


def _eos_token_ids(folder: Path, text_config: Any) -> tuple[int, ...]:
    """The tokens that end a generation: as the folder declares them, else as its architecture."""
    default = getattr(text_config, "eos_token_id", None)
    of_kind = () if default is None else tuple(int(token) for token in np.atleast_1d(default))
    return eos_token_ids(folder) or of_kind


def identify(model: LoadedModel) -> tuple[str, str]:
    """The hashes by which a worker names its model and its tokenizer in Describe, see
    `cluster.models.fingerprint`: the former as served; the latter "" where a folder has none."""
    try:
        tokenizer = folder_tokenizer_hash(model.source)
    except ConfigError:  # a drafter may come without one; it then serves any vocabulary
        tokenizer = ""
    return served_hash(model_hash(model.source), model.weights), tokenizer
