"""A layer's small parts for our kernels: norms, gated feed-forwards, and products of one input.

Between the products of a decoding step torch spends most of its time on starting tiny operations.
The parts that nearly every model has are recognised by what they hold, replaced, and compared with
the original on random rows first: an unusual variant stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

import torch
from torch.overrides import TorchFunctionMode

from cluster.engine.cpu.kernels import Kernels
from cluster.engine.cpu.packed_linear import PackedLinear, agree, is_packable, without_numbers
from cluster.engine.decoder import JOINED
from cluster.models.experts import Experts, linear_of

# Layers that are given the same input, by the names that transformers' models use.
_SIBLINGS = ("q_proj", "k_proj", "v_proj")
_CONVERSIONS = (torch.Tensor.type, torch.Tensor.to, torch.Tensor.float)
_CHECKED_ROWS = (3,)
_TOLERANCE = 1e-5


class NativeRMSNorm(torch.nn.Module):
    """weight * x / sqrt(mean(x^2) + epsilon) in float32."""

    def __init__(self, kernels: Kernels, weight: torch.nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self._kernels = kernels
        self.weight = weight
        self.variance_epsilon = epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., size] -> the same shape."""
        return self._kernels.rms_norm(rows, self.weight, self.variance_epsilon)


class NativeMLP(torch.nn.Module):
    """down(silu(gate(x)) * up(x)), the two first products in one pass over their weights.

    ORIGINALS: the layers that each product computes."""

    ORIGINALS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "gate_up": ("gate_proj", "up_proj"),
        "down": ("down_proj",),
    }

    def __init__(self, kernels: Kernels, mlp: Any) -> None:
        super().__init__()
        self._kernels = kernels
        self.gate_up = joined([mlp.gate_proj, mlp.up_proj], kernels)
        self.down = PackedLinear(mlp.down_proj, kernels)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., size] -> the same shape."""
        # By call, so that hooks see the products.
        return self.down(self._kernels.silu_product(self.gate_up(rows)))

    def part(self, name: str) -> tuple[PackedLinear, int, int, int]:
        """The product that computes a layer of the original, the layer's first column there, and
        the layer's in_features and out_features.  Raises KeyError for a name that it has not."""
        size = self.down.in_features
        inner = self.gate_up.in_features
        return {
            "gate_proj": (self.gate_up, 0, inner, size),
            "up_proj": (self.gate_up, size, inner, size),
            "down_proj": (self.down, 0, size, self.down.out_features),
        }[name]


class _Siblings:
    """Layers with one input: whoever is asked first computes for all.

    What was computed is kept until everyone has taken his part, for that very tensor only.
    """

    def __init__(self, product: PackedLinear, num_parts: int) -> None:
        self._product = product
        self._num_parts = num_parts
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None  # rows, and all parts of them
        self._left = 0

    def part(self, rows: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if self._kept is None or self._kept[0] is not rows:
            self._kept, self._left = (rows, self._product.forward(rows)), self._num_parts
        output = self._kept[1]
        self._left -= 1
        if not self._left:
            self._kept = None
        return output[..., start:stop]


class SiblingLinear(torch.nn.Module):
    """One of several linear layers that are given the same input."""

    weight: torch.Tensor

    def __init__(self, linear: torch.nn.Linear, siblings: _Siblings, start: int) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._siblings = siblings
        self._start = start
        self.register_buffer("weight", without_numbers(linear.weight), False)
        self.bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., in_features] -> [..., out_features], a view of all siblings' output."""
        return self._siblings.part(rows, self._start, self._start + self.out_features)


class NativeRouter(TorchFunctionMode):
    """The `forward` of a module that says which experts a row goes to, or how much one counts.

    It is the original's but for the product with the weight, whose numbers move into it: that is
    ours, so that a row's choice depends on that row alone.  It is never one in few bits."""

    def __init__(self, router: Any, kernels: Kernels) -> None:
        super().__init__()
        self._original = router.forward
        self._weight = router.weight
        self.product = PackedLinear(linear_of(router.weight), kernels)
        router.weight.data = self.product.weight

    def __call__(self, *args: Any) -> Any:
        """What the original returns."""
        with self:
            return self._original(*args)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _CONVERSIONS and args[0] is self._weight:
            return self._weight  # the product widens what it has to
        if function is not torch.nn.functional.linear or args[1] is not self._weight:
            return function(*args, **(kwargs or {}))
        rows = self.product(args[0])
        # With a gap between rows torch computes what follows row by row.  Without, the last numbers
        # of all are computed one by one, with other exponentials than those of vectors.
        spaced = torch.nn.functional.pad(rows, (0, 1))[..., :-1]
        return spaced if len(args) < 3 or args[2] is None else spaced + args[2]


def fuse_layers(module: torch.nn.Module, kernels: Kernels) -> int:
    """Replace what our kernels compute in one go, in float32 models on the CPU; returns how many.

    To be called before the remaining linear layers are packed.
    """
    num_fused = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Experts):
                _route(parent, child, kernels)
            fused = _fused(child, kernels)
            if fused is not None:
                setattr(parent, name, fused)
                num_fused += 1
        num_fused += _join_siblings(parent, kernels)
    return num_fused


def products(module: torch.nn.Module) -> Iterator[tuple[PackedLinear, tuple[str, ...]]]:
    """Every packed layer with the names of the linear layers that it computes, as they were before
    they were fused, in the order of its outputs."""
    for parent_name, parent in module.named_modules():
        originals = NativeMLP.ORIGINALS if isinstance(parent, NativeMLP) else {JOINED: _SIBLINGS}
        for name, child in parent.named_children():
            if isinstance(child, PackedLinear):
                prefix = f"{parent_name}." if parent_name else ""
                yield child, tuple(prefix + each for each in originals.get(name, (name,)))


def joined(layers: Sequence[torch.nn.Linear], kernels: Kernels) -> PackedLinear:
    """Linear layers of one input as one, outputs side by side."""
    has_bias = layers[0].bias is not None
    weight = torch.cat([each.weight for each in layers])
    bias = torch.cat([each.bias for each in layers]) if has_bias else None
    return PackedLinear(linear_of(weight, bias), kernels)


def _fused(module: torch.nn.Module, kernels: Kernels) -> torch.nn.Module | None:
    """What could replace the module, if it computes the same."""
    if isinstance(module, NativeRMSNorm):
        return None  # it was replaced before
    if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
        return None
    children: dict[str, Any] = dict(module.named_children())
    if type(module).__name__.endswith("RMSNorm") and not children:
        weight = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not (_is_plain_vector(weight) and isinstance(epsilon, float)):
            return None
        norm = NativeRMSNorm(kernels, weight, epsilon)
        is_same = agree(module, norm, len(weight), _CHECKED_ROWS, _TOLERANCE)
        return norm if is_same else None
    if not {"gate_proj", "up_proj", "down_proj"} <= children.keys():
        return None
    gate, up = children["gate_proj"], children["up_proj"]
    if (
        not _are_joinable([gate, up])
        or gate.out_features != up.out_features
        or not _is_plain(children["down_proj"])
    ):
        return None
    mlp = NativeMLP(kernels, module)
    return mlp if agree(module, mlp, gate.in_features, _CHECKED_ROWS, _TOLERANCE) else None


def _route(mixture: torch.nn.Module, experts: Experts, kernels: Kernels) -> None:
    """Give what has an output for each of a mixture's experts, or one alone, our product."""
    inside = set(experts.modules())
    for router in mixture.modules():
        weight = getattr(router, "weight", None)
        if (
            router not in inside
            and isinstance(weight, torch.nn.Parameter)
            and weight.dim() == 2
            and len(weight) in (1, len(experts))
            and "forward" not in vars(router)
        ):
            router.forward = NativeRouter(router, kernels)


def _is_plain_vector(weight: Any) -> TypeGuard[torch.nn.Parameter]:
    return (
        type(weight) is torch.nn.Parameter
        and weight.dim() == 1
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
    )


def _join_siblings(parent: torch.nn.Module, kernels: Kernels) -> int:
    """Compute an attention's products of one input as one; returns how many times."""
    layers: list[Any] = [getattr(parent, name, None) for name in _SIBLINGS]
    if not _are_joinable(layers):
        return 0
    product = joined(layers, kernels)
    siblings = _Siblings(product, len(layers))
    start = 0
    for name, layer in zip(_SIBLINGS, layers, strict=True):
        setattr(parent, name, SiblingLinear(layer, siblings, start))
        start += layer.out_features
    # Kept where the other products are found, and freed with the parent.
    parent.register_module(JOINED, product)
    return 1


def _are_joinable(layers: Sequence[Any]) -> bool:
    """True if they may be one product: plain ones of one input, with a bias all or none."""
    return all(
        _is_plain(layer)
        and layer.in_features == layers[0].in_features
        and (layer.bias is None) == (layers[0].bias is None)
        for layer in layers
    )


def _is_plain(layer: Any) -> bool:
    return is_packable(layer) and layer.weight.dtype == torch.float32
