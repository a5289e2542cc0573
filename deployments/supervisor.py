"""`drafthouse serve` as two processes: one runs Ray, the one above it sees the end of that.

Whoever ends a process group (systemd, `timeout`, a terminal) signals every process in it.  Ray's
daemons would be gone before Serve is shut down in order, and Ray ends a process whose daemons are
gone, whatever that process has still to do.  So Ray gets a session of its own, below a process that
passes signals on to it and that removes what is left when it has ended, in whatever way.

Where both are killed, a third one, the guard, does so: `python -m deployments.supervisor SESSION
FOLDER`.  Its standard input ends when nobody is left who would do it.  Most of Ray's processes end
by themselves then, its agents a minute later.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from cluster.errors import ConfigError
from cluster.worker.priority import adopt_orphans, end_with_parent

# Every process below this one, and how to see the last of them.
#
# Ray starts a tree of processes.  `ray.shutdown` ends it, but not when the signal to stop arrives
# while Ray itself is still starting; so whatever is left of the tree is ended here, by its id.

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
    for abandoned in _folders(are_abandoned=True):
        shutil.rmtree(abandoned, ignore_errors=True)
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
    for folder in _folders(are_abandoned=False):
        with contextlib.suppress(OSError):  # not told yet, or just gone
            told: dict[str, Any] = json.loads((folder / _ANNOUNCED).read_text("utf-8"))
            if told["port"] == port:
                return told
    raise ConfigError(
        f"no `drafthouse serve` of yours listens at port {port} here; start one, or name "
        "its port by --set http.port=PORT"
    )


def _folders(*, are_abandoned: bool) -> Iterator[Path]:
    """Yield the folders of this user's servers that run; or of those that were killed, with all
    that watched them."""
    for folder in Path(_PLACE).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # what cannot be looked at is somebody else's
            is_own = folder.lstat().st_uid == os.getuid()
            if is_own and _is_abandoned(folder) == are_abandoned:
                yield folder


def _is_abandoned(folder: Path) -> bool:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


# The two processes, and the third.

EXIT_BAD_CONFIG = 2
EXIT_INTERRUPTED = 130
# Processes that Ray has just told to end, or that have seen the end of their parent, are given so
# long.
_GRACE_S = 3.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Of what Ray wrote before the child failed, so many lines are shown.
_NUM_LAST_LINES = 20
_RAYS_OWN = "ray-stderr"


def supervised(body: Callable[[Path], int]) -> int:
    """Run `body` in a child process with a session of its own; returns its exit status.

    body: is given a short-lived folder (a short one: Ray keeps its sockets there).  SIGINT and
    SIGTERM are passed on to it.  When it has ended, so have all processes below it, and the folder
    is gone.  After a signal the status is 0, or 130 where nothing had been started yet, even if Ray
    ended the child before its time.

    Call it before there are threads, for it forks, and once, at the end of a process: what signals
    do stays so.
    """
    with short_lived_folder() as folder:
        return _supervised(body, folder)


def _supervised(body: Callable[[Path], int], folder: Path) -> int:
    asked: list[int] = []
    # Both processes hold the other end for as long as they live.
    alive, _ = os.pipe()
    # Held back until the child's id is known.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    child = os.fork()
    if child == 0:
        os.close(alive)
        _run_child(body, folder)

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in _SIGNALS:
        signal.signal(number, pass_on)
    adopt_orphans()
    guard = subprocess.Popen(
        [sys.executable, "-m", __name__, str(child), str(folder)],
        cwd=Path(__file__).resolve().parents[1],
        stdin=alive,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for number in _SIGNALS:  # another process may soon have the child's id
        signal.signal(number, signal.SIG_IGN)
    guard.kill()
    guard.wait()
    end_descendants(_GRACE_S)
    if not asked and status not in (0, EXIT_INTERRUPTED, EXIT_BAD_CONFIG):
        _show_last_lines(folder / _RAYS_OWN)
    if asked:
        return EXIT_INTERRUPTED if status == EXIT_INTERRUPTED else 0
    return status if status >= 0 else 128 - status


def _run_child(body: Callable[[Path], int], folder: Path) -> None:
    """`body` in a session of its own; does not return."""
    status = 1
    try:
        os.setsid()
        end_with_parent(signal.SIGTERM)
        _divert_native_output(folder / _RAYS_OWN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        status = body(folder)
    except BaseException:  # noqa: BLE001 - whatever it is, the process ends here
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):  # nobody may read them any more
            sys.stdout.flush()
            sys.stderr.flush()
        # Without the interpreter's own teardown: Ray's threads may outlive it and abort.
        os._exit(status)


def _divert_native_output(path: Path) -> None:
    """What Ray's own libraries write to stderr goes to a file; what Python says, to the console.

    They report every daemon that ends, also where that is what was asked for.
    """
    console = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1, errors="backslashreplace")
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
            handler.setStream(console)
    sys.stderr = console
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)


def _show_last_lines(path: Path) -> None:
    with contextlib.suppress(OSError):
        lines = path.read_text("utf-8", "replace").splitlines()[-_NUM_LAST_LINES:]
        if lines:
            sys.stderr.write("\n  ".join(["drafthouse: Ray said last:", *lines]) + "\n")


def _guard() -> None:
    session, folder = int(sys.argv[1]), Path(sys.argv[2])
    sys.stdin.buffer.read()
    _end(partial(_of_session, session), _GRACE_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard()
