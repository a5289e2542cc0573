"""The faults that a cluster is given, by name."""

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from tests.nodes.conftest import Cluster

# Longer than the silence after which a peer is left, shorter than Serve's patience with a replica.
_SILENT_S = 5.0
_ENDED_S = 60.0
ROLES = ("ingress", "coordinator", "target", "drafter-lm", "drafter-lookup", "drafter-suffix")

Fault = Callable[[Cluster, random.Random], None]


def _kill(role: str, cluster: Cluster, draw: random.Random) -> None:
    os.kill(draw.choice(cluster.replicas(role))[1], signal.SIGKILL)


def _stop(role: str, cluster: Cluster, draw: random.Random) -> None:
    _, pid = draw.choice(cluster.replicas(role))
    os.kill(pid, signal.SIGSTOP)
    time.sleep(_SILENT_S)
    os.kill(pid, signal.SIGCONT)


def _ranks(cluster: Cluster) -> list[int]:
    """The ranks of targets that are no replica's own process."""
    return [
        child.pid
        for _, pid in cluster.replicas("target")
        for child in psutil.Process(pid).children()
        if child.is_running() and "cluster.worker.ranks" in child.cmdline()
    ]


def _kill_rank(cluster: Cluster, draw: random.Random) -> None:
    os.kill(draw.choice(_ranks(cluster)), signal.SIGKILL)


def _stop_rank(cluster: Cluster, draw: random.Random) -> None:
    """For good: its target ends, and with it the rank."""
    pid = draw.choice(_ranks(cluster))
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + _ENDED_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, "a rank that is silent was not ended with its target"
        time.sleep(0.05)


def _kill_controller(cluster: Cluster, draw: random.Random) -> None:
    """Serve's controller, wherever it runs."""
    (pid,) = cluster.nodes.pids("ray::ServeController")
    os.kill(pid, signal.SIGKILL)


def _kill_node(cluster: Cluster, draw: random.Random) -> None:
    node = draw.choice(cluster.nodes.nodes)
    cluster.nodes.kill(node)
    cluster.nodes.start(node)


def _break_link(one_way: bool, cluster: Cluster, draw: random.Random) -> None:
    """A node's link.  Ray may end a node that it could not reach."""
    node = draw.choice(cluster.nodes.nodes)
    cluster.nodes.isolate(node, one_way=one_way)
    time.sleep(_SILENT_S)
    cluster.nodes.heal(node)


def _kill_head(cluster: Cluster, draw: random.Random) -> None:
    """The GCS, and all of Ray on its node, as when Kubernetes replaces a head's pod."""
    cluster.nodes.kill_head()


HEAD = "head"  # possible where Redis keeps the state of the GCS

FAULTS = {
    **{f"SIGKILL {role}": partial(_kill, role) for role in ROLES},
    **{f"SIGSTOP {role}": partial(_stop, role) for role in ROLES},
    "SIGKILL rank": _kill_rank,
    "SIGSTOP rank": _stop_rank,
    "SIGKILL controller": _kill_controller,
    "node": _kill_node,
    HEAD: _kill_head,
    "link, one way": partial(_break_link, True),
    "link, both ways": partial(_break_link, False),
}
