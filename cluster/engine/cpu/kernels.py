"""Products and attention of few rows on a CPU, in C++: compiled once per machine, then loaded.

Why our own: a step of 1 to 16 rows is bound by reading the weights.  No library here multiplies
bfloat16 weights by several rows at that cost, with the processor's bfloat16 instructions or
without, none gives a row the same bits whatever stands beside it, and all wait for every thread at
every layer.
The sources say how; without a compiler everything runs as before, by torch's libraries.
"""

from __future__ import annotations

import ctypes
import enum
from functools import cache
from pathlib import Path

import torch

from cluster import cpp
from cluster.engine.cpu.products import products_here
from cluster.engine.device import zeros_in_huge_pages
from cluster.engine.draw.native import DrawKernels
from cluster.engine.types import LayerSpec
from cluster.errors import ConfigError
from cluster.models.grouped import GroupedWeight
from cluster.records import record

# Formats of keys and values that attention reads.
CACHE_DTYPES = (torch.float32, torch.bfloat16)
# As groups.h has them: bytes of the header, outputs of a block, inputs of a unit.
_HEADER_BYTES, _OUTPUTS, _UNIT = 64, 16, 32

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES: cpp.Signatures = {
    "linear": (None, *[_POINTER] * 5, *[_LONG] * 3, *[_INT] * 2),
    "linear_block": (_LONG,),
    "choose_products": (_INT, ctypes.c_char_p),
    "attention_limit": (_LONG, _INT),
    "attention": (
        None,
        _POINTER,
        _LONG,
        _LONG,
        _POINTER,
        *[_LONG] * 3,
        *[_POINTER] * 6,
        _LONG,
        *[_POINTER] * 2,
        _FLOAT,
        _FLOAT,
        _LONG,
        _INT,
        _INT,
    ),
    "rms_norm": (None, *[_POINTER] * 3, _LONG, _LONG, _FLOAT),
    "silu_product": (None, _POINTER, _POINTER, _LONG, _LONG),
    "rotations": (None, _POINTER, _LONG, _LONG, _FLOAT, _POINTER, _POINTER),
    "decoder_layers": (None, *[_POINTER] * 4, _LONG, _LONG, _POINTER, _INT),
    "decoder_layer_scratch": (ctypes.c_int64, _POINTER, ctypes.c_int64),
    "growth_scratch": (ctypes.c_int64, _POINTER, ctypes.c_int64),
    "grow_trees": (ctypes.c_int64, *[_POINTER] * 3, ctypes.c_int64, _INT),
}


class Format(enum.IntEnum):
    """The format of a packed weight and of the rows it is multiplied by; as in operations.h.

    FLOAT32, BF16: by float32.  BF16_PRODUCTS: by rows rounded to bfloat16, as the processor
    multiplies them; sums are float32's all the same.  GROUPS: a `GroupedWeight`, by rows rounded
    to 8 bits.
    """

    FLOAT32 = 0
    BF16 = 1
    BF16_PRODUCTS = 2
    GROUPS = 3


class Kernels(DrawKernels):
    """The compiled functions, those over the vocabulary among them.

    lanes: floats in a vector; attention wants heads of a multiple of it.  max_sharing: query heads
    per key head at most.  block: outputs that a packed weight's blocks hold.  multiplies_bf16:
    whether BF16_PRODUCTS has instructions here; without any it gives nearly the same numbers,
    slowly.  products: the instructions that multiply groups, a name in `cpp.PRODUCTS`.  library:
    what takes structures is called by those who fill them.  build, sources: see
    `cpp.Native`.
    """

    def __init__(self, library: ctypes.CDLL, build: str, sources: str = "") -> None:
        super().__init__(library)
        cpp.declared(library, _SIGNATURES)
        self.build, self.sources = build, sources
        self.block: int = library.linear_block()
        self.lanes: int = library.attention_limit(0)
        self.max_sharing: int = library.attention_limit(1)
        self.multiplies_bf16 = bool(library.multiplies_bf16())
        # With C behind them, unless one is named.
        self.products = next(filter(self.choose_products, products_here()), "")
        if not self.products:
            named = ", ".join(products_here())
            raise ConfigError.at("DRAFTHOUSE_NATIVE", f"the native code has no {named} here")

    def attends(self, num_heads: int, layer: LayerSpec) -> bool:
        """True if `attention` can compute a layer with so many query heads, or need not."""
        sharing = num_heads // layer.num_kv_heads
        return layer.is_convolution or (
            not layer.is_latent and self.takes(layer, layer.head_dim, sharing)
        )

    def takes(self, kept: LayerSpec | torch.Tensor, head_dim: int, sharing: int) -> bool:
        """True if `attention` reads keys of that device and format, with so many query heads for
        each of them."""
        return (
            kept.device.type == "cpu"
            and kept.dtype in CACHE_DTYPES
            and head_dim % self.lanes == 0
            and sharing <= self.max_sharing
        )

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """weight [out, in], float32 or bfloat16 -> the layout that `linear` reads, same dtype."""
        num_outputs, num_inputs = weight.shape
        is_bf16 = weight.dtype == torch.bfloat16
        num_blocks = -(-num_outputs // self.block)
        padding = (0, num_inputs % 2 if is_bf16 else 0, 0, num_blocks * self.block - num_outputs)
        padded = torch.nn.functional.pad(weight, padding)
        if is_bf16:
            strips = padded.view(num_blocks, 2, 2, self.lanes, -1, 2).permute(0, 1, 4, 2, 3, 5)
        else:
            strips = padded.view(num_blocks, 2, 2, self.lanes, -1).permute(0, 1, 4, 2, 3)
        return zeros_in_huge_pages(strips.shape, weight.dtype).copy_(strips)

    def choose_products(self, name: str) -> bool:
        """Multiply groups with these instructions; False where the library has none of the name."""
        return bool(self.library.choose_products(name.encode()))

    def pack_groups(self, weight: GroupedWeight) -> torch.Tensor:
        """The weight -> uint8[bytes], as groups.h has it."""
        num_outputs, num_inputs = weight.shape
        num_blocks, num_units = -(-num_outputs // _OUTPUTS), -(-num_inputs // _UNIT)
        halves = _UNIT // weight.group

        def by_block(tensor: torch.Tensor, width: int) -> torch.Tensor:
            missing = (num_units * width - tensor.shape[1], num_blocks * _OUTPUTS - num_outputs)
            padded = torch.nn.functional.pad(tensor, (0, missing[0], 0, missing[1]))
            return padded.view(num_blocks, _OUTPUTS, num_units, width)

        scales = [weight.scale] if weight.minimum is None else [weight.scale, weight.minimum]
        parts = [by_block(each, halves).permute(0, 2, 3, 1).contiguous() for each in scales]
        integers = by_block(weight.q, _UNIT).view(num_blocks, _OUTPUTS, num_units, -1, 4)
        integers = integers.permute(0, 2, 3, 1, 4)
        if weight.bits == 4:
            integers = integers[:, :, :4] | integers[:, :, 4:] << 4
        header = torch.zeros(_HEADER_BYTES // 4, dtype=torch.int32)
        header[:3] = torch.tensor([weight.bits, halves, len(scales) - 1])
        units = torch.cat(
            [each.flatten(2).view(torch.uint8) for each in (*parts, integers.contiguous())], dim=2
        )
        whole = torch.cat([header.view(torch.uint8), units.flatten()])
        return zeros_in_huge_pages(whole.shape, whole.dtype).copy_(whole)

    def linear(
        self,
        rows: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        num_outputs: int,
        format: Format,
    ) -> torch.Tensor:
        """rows float32 [..., in], bias float32 [out] -> float32 [..., out]; a row's result depends
        on that row alone, to the bit."""
        rows = rows.contiguous()
        num_inputs = rows.shape[-1]
        num_rows = rows.numel() // num_inputs
        output = torch.empty((*rows.shape[:-1], num_outputs), dtype=torch.float32)
        panels = torch.empty_like(rows)
        self.library.linear(
            rows.data_ptr(),
            panels.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            output.data_ptr(),
            num_rows,
            num_inputs,
            num_outputs,
            format,
            self.num_threads,
        )
        return output

    def attention(
        self,
        query: torch.Tensor,
        kv: torch.Tensor,
        rows: RowPointers,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        window: int | None,
    ) -> torch.Tensor:
        """query float32 [heads, rows, head_dim], each head's row contiguous; kv [slots, 2,
        kv_heads, head_dim], contiguous, float32 or bfloat16.  Returns float32 [rows, heads,
        head_dim], zero where no share has the row."""
        num_heads, num_rows, head_dim = query.shape
        output = torch.empty((num_rows, num_heads, head_dim), dtype=torch.float32)
        if rows.num_rows < num_rows:
            output[rows.num_rows :].zero_()
        self.library.attention(
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            kv.data_ptr(),
            kv.shape[2],
            num_heads,
            head_dim,
            *rows.pointers,
            rows.num_tasks,
            output.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            scaling,
            softcap or 0.0,
            window or 0,
            kv.dtype == torch.bfloat16,
            self.num_threads,
        )
        return output

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """weight * rows / sqrt(mean(rows^2) + epsilon): rows [..., size], weight float32."""
        dtype = rows.dtype
        rows = rows.float().contiguous()
        output = torch.empty_like(rows)
        size = rows.shape[-1]
        num_rows = rows.numel() // size
        self.library.rms_norm(
            rows.data_ptr(), weight.data_ptr(), output.data_ptr(), num_rows, size, epsilon
        )
        return output.to(dtype)

    def silu_product(self, rows: torch.Tensor) -> torch.Tensor:
        """rows float32 [..., 2 * size], gates first -> silu(gates) * the others, [..., size]."""
        rows = rows.float().contiguous()
        size = rows.shape[-1] // 2
        output = torch.empty((*rows.shape[:-1], size), dtype=torch.float32)
        self.library.silu_product(rows.data_ptr(), output.data_ptr(), output.numel() // size, size)
        return output

    def rotations(self, frequencies: torch.Tensor, length: int, scaling: float) -> torch.Tensor:
        """Cosines and sines of the positions below `length`: frequencies float32[head_dim / 2] ->
        float32[2, 1, length, head_dim]."""
        count = len(frequencies)
        cosines, sines = both = torch.empty(2, 1, length, 2 * count, dtype=torch.float32)
        self.library.rotations(
            frequencies.data_ptr(), count, length, scaling, cosines.data_ptr(), sines.data_ptr()
        )
        return both


@record
class RowPointers:
    """The addresses of arrays that tell the attention kernel what each row of a batch sees.

    owners: of what is pointed at."""

    num_rows: int
    num_tasks: int
    pointers: tuple[int, ...]
    owners: object


@cache
def load() -> Kernels | None:
    """The kernels for this machine; None where they cannot be built, see `cpp.load`."""
    native = cpp.load(Path(__file__).parent)
    if native is None:
        return None
    kernels = Kernels(native.library, native.build, native.sources)
    kernels.num_threads = torch.get_num_threads()
    return kernels
