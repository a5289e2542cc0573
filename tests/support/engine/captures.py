"""What stands for CUDA's capturing where there is no GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Storages(TorchDispatchMode):
    """Notes whose memory operators read or write that they have not made themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set()
        self._kept: list[torch.Tensor] = []  # so that no address is used twice
        self._own = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_address(each) for each in tensors((args, kwargs))}
        self.found |= given - self._own
        result = func(*args, **(kwargs or {}))
        made = [each for each in tensors(result) if _address(each) not in given]
        self._own |= {_address(each) for each in made} - self.found
        self._kept += made
        return result


def tensors(value: Any) -> list[torch.Tensor]:
    """In whatever holds them."""
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recorder:
    """A capture that calls the function again.

    storages: per graph, those it met when captured and at each replay."""

    def __init__(self, *, notes_storages: bool = False) -> None:
        self.num_captures = 0
        self.num_replays = 0
        self.storages: list[list[set[int]]] = []
        self._notes_storages = notes_storages

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        met: list[set[int]] = []
        self.storages.append(met)
        self._run(run, met)

        def replay() -> None:
            self.num_replays += 1
            self._run(run, met)

        return replay

    def _run(self, run: Callable[[], None], met: list[set[int]]) -> None:
        if not self._notes_storages:
            run()
            return
        with _Storages() as storages:
            run()
        met.append(storages.found)


class Failing:
    """A capture that CUDA refuses."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_calls += 1
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")


def stale(run: Callable[[], None]) -> Callable[[], None]:
    """A capture whose replays leave everything as it is."""
    run()
    return lambda: None
