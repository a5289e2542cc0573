"""Priorities of this process and its threads beside others on the same cores.

A nice value counts within a scheduling group.  Desktop and server kernels put every login session
into a group of its own (CONFIG_SCHED_AUTOGROUP), and groups share the cores alike, whatever their
threads' nice values: a process that leads a session has to lower the group.  Containers have
groups of their own too, whose weight is the operator's (CPU requests), not ours.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path

log = logging.getLogger(__name__)

_AUTOGROUP = Path("/proc/self/autogroup")
# Python's own is ten times as long: as long as some drafters take for a tree.
_SWITCH_INTERVAL_S = 0.0005


def shorten_switch_interval() -> None:
    """Let the thread that reads the network interrupt the one that computes ten times as often."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def freeze_gc() -> None:
    """Exclude every object that exists now from later garbage collections.

    Call it once a model is loaded: a full collection over torch and transformers stops the process
    for 0.2 s.
    """
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
        return  # the group is shared with others, who have not asked for it
    try:
        if _group_nice() < nice:
            _AUTOGROUP.write_text(str(nice))
    except (OSError, ValueError) as error:  # no such groups here, or not allowed
        log.debug("the session's group keeps its priority: %s", error)


def _group_nice() -> int:
    # As in "/autogroup-243 nice 0"; nothing where the session was never given a group.
    words = _AUTOGROUP.read_text().split()
    if not words:
        raise ValueError(f"{_AUTOGROUP} is empty: this session has no group of its own")
    return int(words[-1])
