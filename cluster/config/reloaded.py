"""Values that are made of files, and made again when one of the files has changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from cluster.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")

Stamp = tuple[tuple[int, int, int] | None, ...]


class Reloaded(Generic[T]):
    """The value that `load` makes of files; a look at their times costs a few microseconds.

    A change that cannot be loaded leaves the value as it is, and is said once in the log.
    """

    def __init__(self, paths: Sequence[str], load: Callable[[], T]) -> None:
        """load: raises ConfigError for files that cannot be used, here too."""
        self._paths = tuple(paths)
        self._load = load
        self._stamp = self._stamps()
        self._value = load()
        self.fault = ""  # why the files as they are now are not used

    def get(self) -> T:
        """Return the value of the files as they are now."""
        stamp = self._stamps()
        if stamp == self._stamp:
            return self._value
        try:
            value = self._load()
        except ConfigError as error:
            self.fault = error.message
            log.error("what was read before stays in use: %s", error.message)
        else:
            if stamp != self._stamps():
                return self._value  # replaced while they were read; the next call reads again
            log.info("read anew: %s", ", ".join(self._paths))
            self._value, self.fault = value, ""
        self._stamp = stamp
        return self._value

    def _stamps(self) -> Stamp:
        return tuple(map(_stamp, self._paths))


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        # Follows links: a volume of Kubernetes changes by a link to another folder.
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
