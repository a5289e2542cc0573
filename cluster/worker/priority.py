"""Priorities, cores and relatives of this process among others on the same machine.

A nice value only counts within a scheduling group.  Many kernels put every login session into a
group of its own (CONFIG_SCHED_AUTOGROUP) and give all groups the same share of the cores, whatever
the nice values of their threads.  So a process that leads a session lowers its group too.
Containers are groups as well; the operator sets their weight (CPU requests).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster.errors import ConfigError

log = logging.getLogger(__name__)

_AUTOGROUP = Path("/proc/self/autogroup")
# Python's default is ten times as long, about the time in which some drafters grow a tree.
_SWITCH_INTERVAL_S = 0.0005
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def shorten_switch_interval() -> None:
    """Let Python switch between threads ten times as often, so that network input is read soon."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def pin_to_cores(cores: Sequence[int]) -> None:
    """Restrict this process, with its present and future threads, to these cores.

    An empty sequence changes nothing.  Raises ConfigError for a core that the process may not use.
    """
    if not cores:
        return
    allowed = os.sched_getaffinity(0)
    for core in cores:
        if core not in allowed:
            raise ConfigError(
                f"cores: {core} is not one of the cores that this process may use, "
                f"{', '.join(map(str, sorted(allowed)))}",
                param="cores",
            )
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Inside, no garbage is collected.  Where modules were imported, what is there at the end is
    excluded from collections.

    For large libraries: what modules hold is no garbage, and to find that out again and again takes
    a quarter of the time in which torch and transformers are imported.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if was_enabled:
            gc.enable()


def freeze_gc() -> None:
    """Exclude every object that exists now from later garbage collections.

    Call it once a model is loaded: a full collection over torch and transformers stops the process
    for 0.2 s.  Called again, it first collects what was excluded and is in use no more.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def lower_priority(nice: int) -> None:
    """Lower the calling thread, and on Linux those it starts, by `nice` (0 to 19).

    Where this process leads a session, the session's scheduling group is lowered too, and with it
    all threads of the process.  Never raises a priority.
    """
    if nice <= 0:
        return
    os.nice(nice)
    if os.getsid(0) != os.getpid():
        return  # the group has other processes, whose priority must not change
    try:
        # It contains e.g. "/autogroup-243 nice 0"; it is empty if the session has no group.
        if int(_AUTOGROUP.read_text().split()[-1]) < nice:
            _AUTOGROUP.write_text(str(nice))
    except (OSError, ValueError, IndexError) as error:  # no such groups here, or not allowed
        log.debug("the session's group keeps its priority: %s", error)


def adopt_orphans() -> None:
    """Processes below this one stay below it when their own parent ends (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(number: signal.Signals) -> None:
    """This process is sent a signal when its parent ends, however that ends (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(option, value, 0, 0, 0)
