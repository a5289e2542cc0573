"""Linear layers whose weights are laid out for few rows, on a CPU.

A step of decoding or verification multiplies 1 to 64 rows with every weight: it is bound by memory,
so 8 rows should cost hardly more than one.  torch's own linear layer calls a matrix product that
rearranges the weights in every call, which for a few rows is most of its time.  Here they are
arranged once, at load, by MKL (float32) or oneDNN (bfloat16): the libraries torch computes with
anyway, through the operators its compiler uses.  Results differ by rounding only.
"""

from __future__ import annotations

import itertools
import logging
from typing import TypeGuard
from weakref import WeakValueDictionary

import torch

log = logging.getLogger(__name__)

# What the libraries are told about the number of rows when they choose the layout.  It is good
# from 1 row to hundreds; layouts chosen for fewer rows get slow beyond those.
_EXPECTED_ROWS = 64
# Rows for which a packed layer is compared with the plain one before any is trusted.
_CHECKED_ROWS = (1, 2, 3, 8, 17, 64, 100)
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

_numbers = itertools.count()
# A compiled graph names a packed layer by its number: the compiler does not know such weights.
packed_layers: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()


class PackedLinear(torch.nn.Module):
    """A linear layer for inference: y = x W^T + b.

    `weight` has the shape, dtype and device of W and none of its numbers (it takes no memory);
    they are in the packed form.
    """

    weight: torch.Tensor

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach()
        self.uses_mkl = weight.dtype == torch.float32 and torch._C.has_mkl
        if self.uses_mkl:
            packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _EXPECTED_ROWS)
        else:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
        self.packed: torch.Tensor = packed
        self.register_buffer("weight", weight.new_zeros(1, 1).expand(weight.shape), False)
        self.bias = linear.bias
        self.number = next(_numbers)
        packed_layers[self.number] = self

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., in_features] -> [..., out_features]."""
        if torch.compiler.is_compiling():
            opaque: torch.Tensor = torch.ops.drafthouse.packed_linear(
                rows, self.number, self.out_features
            )
            return opaque
        return self.product(rows)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """What `forward` returns, by the library that packed the weights."""
        product: torch.Tensor
        if self.uses_mkl:
            num_rows = rows.numel() // self.in_features
            product = torch.ops.mkl._mkl_linear(rows, self.packed, self.weight, self.bias, num_rows)
        else:
            product = torch.ops.mkldnn._linear_pointwise(
                rows, self.packed, self.bias, "none", [], ""
            )
        return product

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def pack_linears(module: torch.nn.Module) -> int:
    """Replace every plain linear layer on the CPU by a packed one; returns how many there were.

    Layers with hooks (tensor parallelism, offloading), quantised ones and other subclasses stay.
    A weight that is shared, as an output layer's with the embedding, gets a copy.  Where the
    libraries cannot do it, or a packed product is not the plain one's, every layer stays.
    """
    is_checked = False
    num_packed = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if not _is_packable(child):
                continue
            if not is_checked and not _agrees(child):
                log.warning("linear layers stay as they are: packed ones do not work here")
                return 0
            is_checked = True
            setattr(parent, name, PackedLinear(child))
            num_packed += 1
    log.info("linear layers packed count=%d", num_packed)
    return num_packed


def _is_packable(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    return (
        type(module) is torch.nn.Linear
        and type(module.weight) is torch.nn.Parameter
        and module.weight.device.type == "cpu"
        and module.weight.dtype in _TOLERANCES
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not hasattr(module, "_hf_hook")  # accelerate's, which replaces the forward itself
    )


def _agrees(linear: torch.nn.Linear) -> bool:
    """Whether a packed copy of `linear` gives its products, for all the row counts checked."""
    weight = linear.weight
    with torch.inference_mode():
        try:
            packed = PackedLinear(linear)
            for num_rows in _CHECKED_ROWS:
                rows = torch.linspace(-1, 1, num_rows * linear.in_features, dtype=weight.dtype)
                rows = rows.view(num_rows, linear.in_features).sin()
                expected = linear(rows).float()
                error = (packed(rows).float() - expected).norm()
                if not error <= _TOLERANCES[weight.dtype] * expected.norm():
                    return False
        except (RuntimeError, AttributeError):  # a build of torch without these operators
            return False
    return True
