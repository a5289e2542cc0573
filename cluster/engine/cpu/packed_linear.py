"""Linear layers whose weights are laid out for few rows, on a CPU.

A step of decoding or verification multiplies 1 to 64 rows with every weight: it is bound by memory,
so 8 rows should cost hardly more than one.  torch's own linear layer calls a matrix product that
rearranges the weights in every call, which for a few rows is most of its time.  Here they are
arranged once, at load: for our own kernels where they can be built, else by MKL (float32) or
oneDNN (bfloat16), the libraries torch computes with anyway, through the operators its compiler
uses.  Results differ by rounding only.

Our kernels keep a float32 weight as bfloat16 where that loses nothing, as with every checkpoint
that was published in bfloat16: the results are float32's, to the bit, for half the memory.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch

from cluster.engine.cpu import kernels
from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.device import computes
from cluster.models.grouped import GroupedWeight

log = logging.getLogger(__name__)

# What the libraries are told about the number of rows when they choose the layout.  It is good
# from 1 row to hundreds; layouts chosen for fewer rows get slow beyond those.
_EXPECTED_ROWS = 64
# Rows for which a packed layer is compared with the plain one before any is trusted.
_CHECKED_ROWS = (1, 2, 3, 8, 17, 64, 100)
# Weights in our kernels, of all those that are multiplied, from which a model counts as native.
_NATIVE_SHARE = 0.99
# Of the rows that functions are compared on.
_SCALES = (1.0, 1e-3, 30.0)
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class PackedLinear(torch.nn.Module):
    """A linear layer for inference: y = x W^T + b.

    native: our kernels, where they compute it: then a row's bits do not depend on other rows.
    `weight` has the shape, dtype and device of W and none of its numbers (it takes no memory);
    they are in the packed form.  `format`: how our kernels multiply them.  `weights`: their format
    in memory, with the bits and the group of those in groups.
    """

    weight: torch.Tensor
    format: Format
    weights: str

    def __init__(self, linear: torch.nn.Linear, native: Kernels | None = None) -> None:
        """native: pack for these kernels; None = for torch's libraries."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach()
        self.native = native
        self.uses_mkl = weight.dtype == torch.float32 and torch._C.has_mkl
        self.bias = linear.bias
        self.float_bias: torch.Tensor | None = None
        packed: torch.Tensor
        if native is not None:
            packed = native.pack(_narrowed(weight))
            if linear.bias is not None:
                self.float_bias = linear.bias.detach().float()
        elif self.uses_mkl:
            packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _EXPECTED_ROWS)
        else:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
        self.packed = packed
        is_bf16 = packed.dtype == torch.bfloat16
        self.format = Format.BF16 if is_bf16 else Format.FLOAT32
        self.weights = "bf16" if is_bf16 else "float32"
        self.register_buffer("weight", without_numbers(weight), False)

    def keep_groups(self, weight: GroupedWeight) -> None:
        """Multiply with this weight in place of that of our kernels, by rounded rows."""
        assert self.native is not None
        assert weight.shape == self.weight.shape
        self.packed = self.native.pack_groups(weight)
        self.format = Format.GROUPS
        self.weights = f"int{weight.bits}g{weight.group}"

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., in_features] -> [..., out_features], by the library that packed them."""
        product: torch.Tensor
        if self.native is not None:
            product = self.native.linear(
                rows.float(), self.packed, self.float_bias, self.out_features, self.format
            )
            return product.to(rows.dtype)
        if self.uses_mkl:
            num_rows = rows.numel() // self.in_features
            product = torch.ops.mkl._mkl_linear(rows, self.packed, self.weight, self.bias, num_rows)
        else:
            product = torch.ops.mkldnn._linear_pointwise(
                rows, self.packed, self.bias, "none", [], ""
            )
        return product


def without_numbers(weight: torch.Tensor) -> torch.Tensor:
    """A tensor of the weight's shape, dtype and device that takes no memory and holds no numbers,
    so that the check at load finds out who reads it."""
    return weight.detach().new_full((1, 1), torch.nan).expand(weight.shape)


def choose_kernels(module: torch.nn.Module, *, only_native: bool = False) -> Kernels | None:
    """Our kernels, if they are to compute the module's linear layers; None = torch's libraries are.

    only_native: take our kernels even where torch's libraries are faster.
    """
    first = next((child for child in module.modules() if is_packable(child)), None)
    if first is None:
        return None  # a host that has no use for them compiles none
    native = kernels.load()
    if native is None:
        return None
    # Where the processor itself multiplies the format, oneDNN makes use of that.
    dtype = first.weight.dtype
    is_wanted = only_native or dtype == torch.float32 or not computes(dtype)
    return native if is_wanted and _agrees(first, native) else None


def pack_linears(module: torch.nn.Module, native: Kernels | None = None) -> int:
    """Replace every plain linear layer on the CPU by a packed one; returns how many there were.

    Layers with hooks (tensor parallelism, offloading), quantised ones and other subclasses stay.
    A weight that is shared, as an output layer's with the embedding, gets a copy.  Where torch's
    libraries cannot do it, or a packed product is not the plain one's, every layer stays.
    native: kernels to pack for, as chosen by `choose_kernels`; None = torch's libraries.
    """
    num_packed = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if not is_packable(child):
                continue
            if native is None and num_packed == 0 and not _agrees(child, None):
                log.warning("linear layers stay as they are: packed ones do not work here")
                return 0
            setattr(parent, name, PackedLinear(child, native))
            num_packed += 1
    return num_packed


def is_native(module: torch.nn.Module) -> bool:
    """True if our kernels compute (nearly) all products with the module's weights."""
    share = _share(
        module, lambda child: isinstance(child, PackedLinear) and child.native is not None
    )
    return share > _NATIVE_SHARE


def linear_share(module: torch.nn.Module) -> float:
    """The part of the module's weights, embeddings aside, that `pack_linears` could pack."""
    return _share(module, is_packable)


def plain_share(module: torch.nn.Module) -> float:
    """The same of a module whose weights are elsewhere."""
    return _share(module, lambda child: type(child) is torch.nn.Linear)


def _share(module: torch.nn.Module, is_meant: Callable[[torch.nn.Module], bool]) -> float:
    meant = other = 0
    for child in module.modules():
        if isinstance(child, torch.nn.Linear | PackedLinear) and is_meant(child):
            meant += child.in_features * child.out_features
        elif not isinstance(child, torch.nn.Embedding):
            own = child.parameters(recurse=False)
            other += sum(each.numel() for each in own if each.dim() > 1)
    return meant / max(meant + other, 1)


def _narrowed(weight: torch.Tensor) -> torch.Tensor:
    """The weight as bfloat16 where that loses nothing, else as it is."""
    narrow = weight.to(torch.bfloat16)
    return narrow if torch.equal(narrow.to(weight.dtype), weight) else weight


def is_packable(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """True if this is a plain linear layer on the CPU, without hooks or anything else attached."""
    return (
        type(module) is torch.nn.Linear
        and type(module.weight) is torch.nn.Parameter
        and module.weight.device.type == "cpu"
        and module.weight.dtype in _TOLERANCES
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in vars(module)  # accelerate replaces it, and so does a router's
    )


def _agrees(linear: torch.nn.Linear, way: Kernels | None) -> bool:
    """True if a packed copy of `linear` gives its products."""
    dtype = linear.weight.dtype
    try:
        packed = PackedLinear(linear, way)
    except (RuntimeError, AttributeError):  # a build of torch without these operators
        return False
    return agree(linear, packed, linear.in_features, _CHECKED_ROWS, _TOLERANCES[dtype], dtype)


def agree(
    exact: Callable[[torch.Tensor], torch.Tensor],
    other: Callable[[torch.Tensor], torch.Tensor],
    size: int,
    row_counts: Sequence[int],
    tolerance: float,
    dtype: torch.dtype = torch.float32,
) -> bool:
    """True if two functions of [1, rows, size] are the same but for rounding, for so many rows,
    which are small or large together; False where one takes something else."""
    with torch.inference_mode():
        for count, scale in itertools.product(row_counts, _SCALES):
            rows = torch.linspace(-1, 1, count * size).mul(97.0).sin().view(1, count, size)
            rows = (scale * rows).to(dtype)
            try:
                expected, found = exact(rows).float(), other(rows).float()
            except (RuntimeError, TypeError, ValueError, AttributeError):
                return False
            if not (found - expected).norm() <= tolerance * expected.norm():
                return False
    return True
