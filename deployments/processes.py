"""Every process below this one, and how to see the last of them.

Ray starts a tree of processes.  `ray.shutdown` ends it, but not when the signal to stop arrives
while Ray itself is still starting; so whatever is left of the tree is ended here, by its id.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from cluster.errors import ConfigError

_POLL_S = 0.05
_PATIENCE_S = 10.0

log = logging.getLogger(__name__)


def is_living(process: psutil.Process) -> bool:
    """True if the process runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end_descendants(grace_s: float) -> None:
    """Wait until nothing runs below this process; after `grace_s` end what still does.

    What still runs ten seconds later is left: a process that waits for a device or a network disk
    cannot be ended, and is not waited for.
    """
    _end(partial(psutil.Process().children, recursive=True), grace_s)


def end_session(session: int, grace_s: float) -> None:
    """The same for the processes of a session."""
    _end(partial(_of_session, session), grace_s)


def _of_session(session: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == session:
                yield process


def _end(find: Callable[[], Iterable[psutil.Process]], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    while True:
        _reap()
        left = [*filter(is_living, find())]
        if not left:
            return
        if time.monotonic() > deadline + _PATIENCE_S:
            log.warning("processes that do not end: %s", sorted(one.pid for one in left))
            return
        if time.monotonic() > deadline:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(_POLL_S)


def _reap() -> None:
    """Collect the exit codes of adopted processes, which otherwise remain as zombies."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


# The folder in which a server's Ray keeps its files, and what killed servers left of theirs.


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
