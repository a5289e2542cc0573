"""What a GPU would be asked to do, counted on tensors of the `meta` device, which have no memory.

Every operator that is no view, no allocation and no collective is a kernel; so is every launch of
ours.  A step
that a graph can capture neither reads a result on the host nor asks for one's size: on `meta` both
raise.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.engine.captures import tensors
from tests.support.gpu.launches import launches

META = torch.device("meta")
# Operators that launch nothing, besides those that torch itself calls views.
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_VIEWS = {"_unsafe_view", "_reshape_alias", "alias", "detach", "lift_fresh"}
_COLLECTIVES = {"c10d", "_c10d_functional"}
_NO_COLLECTIVES = {"_wrap_tensor_autograd", "wait_tensor"}  # what torch has beside them
# torch's allocator gives blocks of so many bytes.
_BLOCK = 512


# Answers what the host asks of the device: the operator's name and the tensor; None = zeros.
Answer = Callable[[str, torch.Tensor], Any]


class Counting:
    """Counts what is done inside.

    copies: from the host to the device.  pageable: copies in either direction that stop the host,
    which asks for that by leaving out non_blocking.  waits: for results on the host.  peak_bytes:
    of the memory that was made inside, the most there was at a time.  collectives: calls by their
    names.  launched: the launches of our kernels so far.
    """

    def __init__(self, capability: int = 90, *, answer: Answer | None = None) -> None:
        """answer: None = what the host asks for raises."""
        self.copies = self.pageable = self.waits = 0
        self.collectives = Counter()
        self.peak_bytes = self._bytes = 0
        self._answer = answer
        self._known = set()
        self._operators = Counter()
        self._capability = capability
        self.launched = []
        self._contexts = ExitStack()

    def counted(self) -> Counter[str]:
        """The kernels so far, by their names."""
        return self._operators + Counter(each.name for each in self.launched)

    def __enter__(self) -> Self:
        self.launched = self._contexts.enter_context(launches(self._capability))
        self._contexts.enter_context(_Made(self))
        self._contexts.enter_context(_Mode(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.close()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that torch does not take apart any further."""
        name = func._schema.name.removeprefix("aten::")
        space, _, word = name.rpartition("::")
        if space in _COLLECTIVES and word not in _NO_COLLECTIVES:
            self.collectives[word] += 1
        given = tensors((args, kwargs))
        # Numbers are a kernel's arguments, and not copied.
        from_host = any(each.device.type == "cpu" and each.dim() > 0 for each in given)
        on_device = any(each.device == META for each in given)
        device = kwargs.get("device")
        # Each way is one that the host can be told not to wait for.
        stops = name in ("_to_copy", "copy_") and not (kwargs.get("non_blocking") or args[2:])
        if self._answer is not None and on_device and _is_asked_by_host(name, device):
            self.waits += 1
            self.pageable += stops
            return self._answered(name, given[0], kwargs)
        if name == "index_put_" and _must_count_rows(*args):
            raise RuntimeError("values by a mask: the host waits for how many there are")
        result = func(*args, **kwargs)
        made = tensors(result)
        if not on_device and all(each.device != META for each in made):
            return result  # the host's own affair
        old = {each.untyped_storage()._cdata for each in given}
        for each in made:
            if each.untyped_storage()._cdata not in old:
                self._hold(each)
        if from_host and name in ("_to_copy", "copy_"):
            self.copies += 1
            self.pageable += stops
        elif not func.is_view and name not in _ALLOCATIONS | _VIEWS and space not in _COLLECTIVES:
            self.copies += from_host
            self.pageable += from_host
            self._operators[name] += 1
        return result

    def _answered(self, name: str, given: torch.Tensor, kwargs: Any) -> Any:
        if name == "nonzero":
            self._operators[name] += 1
            return given.new_zeros((0, given.dim()), dtype=torch.int64)
        if name in ("_local_scalar_dense", "equal"):
            return self._answer(name, given)
        answer = self._answer(name, given) if given.dim() > 1 else None
        if answer is not None:
            return torch.as_tensor(answer)
        return torch.zeros(given.shape, dtype=kwargs.get("dtype") or given.dtype)

    def _hold(self, tensor: torch.Tensor) -> None:
        """Count a tensor's memory until nobody has it any more."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device != META or key in self._known:
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self._known.add(key)
        self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        weakref.finalize(storage, self._let_go, key, size)

    def _let_go(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._bytes -= size


class _Made(TorchFunctionMode):
    """Counts tensors made of numbers, which on `meta` are no operator."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor):
            self._counting.copies += made.device == META
            self._counting.pageable += made.device == META
        return made


class _Mode(TorchDispatchMode):
    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode what consists of other operators comes whole
            parts = func.decompose(*args, **kwargs)
        return self._counting.run(func, args, kwargs) if parts is NotImplemented else parts


def _must_count_rows(
    tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, *_: Any
) -> bool:
    """True of several values in place of those of a mask; one is a mask's fill (torch's own rule).
    On `meta` both pass."""
    masks = [each is not None and each.dtype == torch.bool for each in indices]
    return any(masks) and values.numel() != 1


def _is_asked_by_host(name: str, device: Any) -> bool:
    if name in ("_local_scalar_dense", "nonzero", "equal"):
        return True
    return name == "_to_copy" and device is not None and torch.device(device).type == "cpu"
