"""The folder in which a server's Ray keeps its files, and what killed servers left of theirs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError

# A short place: Ray keeps its sockets there.
_PLACE = "/tmp"
_PREFIX = "drafthouse-"
# Locked for as long as a process lives that uses the folder, however that ends.
_LOCK = "lock"
# What commands like `drafthouse apply` have to know.
_ANNOUNCED = "served.json"


@contextlib.contextmanager
def short_lived_folder() -> Iterator[Path]:
    """A folder for this process and those forked from it, which goes at the end."""
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_PLACE))
    # Under its name once it is locked: a server that starts now removes folders with a free lock.
    unnamed = folder / f"{_LOCK}.new"
    lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unnamed.rename(folder / _LOCK)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def announce(folder: Path, port: int, **told: Any) -> None:
    """Let other commands of this user find the server that listens for HTTP at `port`."""
    path = folder / _ANNOUNCED
    path.touch(mode=0o600)
    path.write_text(json.dumps({"port": port, **told}), "utf-8")


def announced(port: int) -> Mapping[str, Any]:
    """What the server at that port has told; raises ConfigError where none does."""
    for path in Path(_PLACE).glob(f"{_PREFIX}*/{_ANNOUNCED}"):
        with contextlib.suppress(OSError):  # another user's, or just gone
            if path.stat().st_uid == os.getuid() and not _is_abandoned(path.parent):
                told: dict[str, Any] = json.loads(path.read_text("utf-8"))
                if told["port"] == port:
                    return told
    raise ConfigError(
        f"no `drafthouse serve` of yours listens at port {port} here; start one, or name "
        "its port by --set http.port=PORT"
    )


def remove_abandoned() -> None:
    """Remove the folders of this user's servers that were killed, with all that watched them."""
    for folder in Path(_PLACE).glob(f"{_PREFIX}*"):
        # What cannot be looked at is somebody else's.
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
