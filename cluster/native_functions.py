"""Functions that drafting has in C++ alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from cluster import cpp
from cluster.errors import ConfigError

NEEDED = (
    "drafts need native code: install a C++ compiler (on Debian and Ubuntu: apt install g++) or "
    "the wheel for this platform, or unset DRAFTHOUSE_NATIVE=0"
)


class NativeFunctions:
    """Functions of the library of the sources in a folder, by name.

    types: result and arguments of each.  The first question may compile the library.
    """

    def __init__(self, folder: Path, types: Mapping[str, tuple[Any, ...]]) -> None:
        self._folder, self._types = folder, types

    @cached_property
    def _found(self) -> Mapping[str, Callable[..., Any]]:
        native = cpp.load(self._folder)
        if native is None:
            return {}
        # Calls of a few microseconds: to give the interpreter away for them is to wait for it.
        return {
            name: ctypes.PYFUNCTYPE(*types)((name, native.library))
            for name, types in self._types.items()
        }

    def are_here(self) -> bool:
        return bool(self._found)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Raises ConfigError where there is no native code."""
        if not self._found:
            raise ConfigError(NEEDED)
        return self._found[name]
