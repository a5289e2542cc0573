"""The folder in which a server's Ray keeps its files, and what killed servers left of theirs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# A short place: Ray keeps its sockets there.
_PLACE = "/tmp"
_PREFIX = "drafthouse-"
# Locked for as long as a process lives that uses the folder, however that ends.
_LOCK = "lock"


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
