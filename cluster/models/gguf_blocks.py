"""The blocks of a GGUF file as weights of a model's linear layers, in the model's order of rows.

A layer's weight is found by the name that llama.cpp gives it, and its rows by their numbers: the
widened weight must be the file's rows, each unchanged, in some order (those of queries and keys
are stored in another one).  What is not, or has another kind of block, is left out.
"""

from __future__ import annotations

import logging
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor

from cluster.models.gguf_file import field
from cluster.models.grouped import GroupedWeight

log = logging.getLogger(__name__)

_BITS = {
    GGMLQuantizationType.Q4_0: 4,
    GGMLQuantizationType.Q4_1: 4,
    GGMLQuantizationType.Q4_K: 4,
    GGMLQuantizationType.Q8_0: 8,
    GGMLQuantizationType.Q6_K: 8,
}
# Of a matrix that was rounded to bfloat16; scales rounded to float16 change it by less.
_TOLERANCE = 2.0**-8


def blocks_of(reader: GGUFReader, model: torch.nn.Module) -> dict[str, GroupedWeight]:
    """The blocks by the names of the linear layers of `model`, which was widened from the file."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    architecture = field(reader, "general.architecture")
    kinds = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    if not kinds:
        return {}
    config: Any = model.config
    names = gguf.get_tensor_name_map(kinds[0], int(config.get_text_config().num_hidden_layers))
    found: dict[str, GroupedWeight] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        stored = tensors.get(f"{names.get_name(name)}.weight")
        if stored is None and layer is model.get_output_embeddings():  # type: ignore[operator]
            stored = tensors.get("token_embd.weight")  # the two are tied
        blocks = None if stored is None else _as_in(stored, layer.weight.detach())
        if blocks is not None:
            found[name] = blocks
    return found


def grouped(kind: GGMLQuantizationType, data: np.ndarray, weights: np.ndarray) -> GroupedWeight:
    """Blocks as the file has them, uint8 [out, bytes], which stand for `weights`, float32 [out,
    in].  Scales of K-quants, products of two numbers, are rounded to float16."""
    num_weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    scale, minimum = _scales(kind, np.ascontiguousarray(data).reshape(-1, num_bytes))
    group, num_outputs = num_weights // scale.shape[1], len(data)
    weights = weights.reshape(num_outputs, -1, group)
    scale = scale.reshape(num_outputs, -1, 1)
    if minimum is not None:
        minimum = minimum.reshape(num_outputs, -1, 1)
        weights = weights - minimum
    # Far from a half, for they were made of whole numbers.
    q = np.divide(weights, scale, out=np.zeros_like(weights), where=scale != 0).round()
    bits = _BITS[kind]
    return GroupedWeight(
        bits=bits,
        group=group,
        q=torch.from_numpy(q.astype(np.uint8 if bits == 4 else np.int8).reshape(num_outputs, -1)),
        scale=torch.from_numpy(scale[..., 0].astype(np.float16)),
        minimum=None if minimum is None else torch.from_numpy(minimum[..., 0].astype(np.float16)),
    )


def _scales(kind: GGMLQuantizationType, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Scale and minimum of each group, float32 [blocks, groups], of uint8 [blocks, bytes]."""

    def half(start: int) -> np.ndarray:
        return (
            np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)
        )

    match kind:
        case GGMLQuantizationType.Q4_0:
            return half(0), -8.0 * half(0)
        case GGMLQuantizationType.Q4_1:
            return half(0), half(2)
        case GGMLQuantizationType.Q4_K:
            scales, minima = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
            return half(0) * scales, -half(2) * minima
        case GGMLQuantizationType.Q6_K:
            return half(208) * blocks[:, 192:208].view(np.int8), None
    return half(0), None  # Q8_0


def _as_in(stored: ReaderTensor, widened: torch.Tensor) -> GroupedWeight | None:
    """The blocks in the order of the rows of `widened`; None where they are not its weights."""
    kind = stored.tensor_type
    if kind not in _BITS:
        return None
    rows = gguf.dequantize(stored.data, kind)
    order = _order(torch.from_numpy(rows).to(widened.dtype), widened)
    if order is None:
        log.info("blocks left out tensor=%s: the model's weight is another one", stored.name)
        return None
    blocks = grouped(kind, stored.data[order], rows[order])
    error = (blocks.dequantized() - widened.float()).norm()
    if not error <= _TOLERANCE * widened.float().norm():
        log.info("blocks left out tensor=%s: their scales are no numbers of 16 bits", stored.name)
        return None
    return blocks


def _order(rows: torch.Tensor, wanted: torch.Tensor) -> np.ndarray | None:
    """The places in `rows` of those of `wanted`, which are the same in another order; else None."""
    if rows.shape != wanted.shape:
        return None
    if torch.equal(rows, wanted):
        return np.arange(len(rows))
    theirs, ours = (each.contiguous().view(torch.uint8).numpy() for each in (rows, wanted))
    places = {row.tobytes(): place for place, row in enumerate(theirs)}
    order = np.array([places.get(row.tobytes(), -1) for row in ours])
    return None if (order < 0).any() else order
