"""Shows on the console what the replicas write in their logs, as far as an operator wants it.

Ray keeps each replica's stderr in a file of its own, and those files end with it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

# As `deployments.replica.configure_logging` writes them.
_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+ \S+ ([.\w]+): ")
_OURS = ("cluster", "deployments")
# Of these, what is ordinary as well: a line for each request, and what the coordinator does.
_TALKERS = ("deployments.ingress.tracing", "cluster.coordinator.moment")

# Lines of these that begin so say how far a start is.
_PROGRESS, _PHASE = ("cluster.engine.loading.progress", "cluster.cpp"), "phase "


def is_wanted(line: str) -> bool:
    """True if a line of a replica's log belongs on the console."""
    level, logger, _ = _parts(line)
    if not logger.startswith(_OURS):
        return False
    return level not in ("DEBUG", "INFO") or (level == "INFO" and logger in _TALKERS)


def _parts(line: str) -> tuple[str, str, str]:
    """Return level, logger and message in either form of our log; "" for a line in none."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            level, logger, message = (
                str(found.get(key, "")) for key in ("level", "logger", "message")
            )
            return level, logger, message
    named = _LINE.match(line)
    return (named[1], named[2], line[named.end() :]) if named else ("", "", "")


class LogFollower:
    """Reads what is new in the replicas' files below one folder; None: they are elsewhere.

    progress: what a model that loads has said last of how far it is.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.progress = ""
        self._read: dict[Path, int] = {}  # bytes, up to the end of a line

    def new_lines(self) -> Iterator[str]:
        """Yield the wanted lines since the last call, file by file."""
        lines: list[str] = []
        for path in sorted(self._folder.glob("worker-*.err")) if self._folder else ():
            offset = self._read.get(path, 0)
            with contextlib.suppress(OSError), path.open("rb") as file:
                if path.stat().st_size < offset:  # Ray has begun it anew
                    offset = 0
                file.seek(offset)
                data = file.read()
                end = data.rfind(b"\n") + 1
                self._read[path] = offset + end
                lines += data[:end].decode("utf-8", "replace").splitlines()
        for line in lines:
            _, logger, message = _parts(line)
            if logger in _PROGRESS and message.startswith(_PHASE):
                self.progress = message
            if is_wanted(line):
                yield line
