"""Several Ray nodes on one machine: each raylet in a network namespace of its own, on one bridge.

The first node, with the GCS and Serve's controller, is the machine's own namespace.  Needs root and
iproute2.  Only processes inside the namespaces are ever ended.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from tests.deployments.conftest import free_ports
from tests.support.choices import absent
from tests.support.deployments.shares import BEFORE_OTHERS, LIKE_OTHERS, share

_START_S = 60.0
# A start may fail while the machine is busy (Ray gives it 30 s), and of two at the same time.
_NUM_ATTEMPTS = 6
# A frame to this address is delivered to nobody; bit 1 marks it as one of no manufacturer.
_NOWHERE = "02:00:00:00:00:fe"
# The cluster is to notice within four seconds that a node is gone, for tests wait for that; on a
# machine that is busy a raylet may need two to answer.
_RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # As KubeRay sets it where the GCS has Redis: raylets wait longer than several starts of a head.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "8",
}


def need_nodes() -> None:
    """Skip the test where namespaces cannot be made; under CI, where they can, fail."""
    if shutil.which("ip") is None:
        absent("iproute2 is not installed")
    if os.geteuid() != 0 or subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        absent("this user may not make network namespaces")


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


@dataclass(slots=True)
class Node:
    """A node; it is left without processes by `kill`, and may be started again."""

    name: str
    address: str
    options: Sequence[str]  # of its `ray start`
    raylet: subprocess.Popen[bytes] = field(init=False)
    away: set[str] = field(default_factory=set)  # addresses that its packets do not reach
    was_cut_off: bool = False  # in this life

    def pids(self, title: str = "") -> list[int]:
        """The processes in its namespace whose command lines hold `title`."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name], check=False, capture_output=True, text=True
        ).stdout
        return [pid for pid in map(int, listed.split()) if title in _command(pid)]


class Nodes:
    """The head, and nodes that can be killed, stopped and cut off from each other."""

    def __init__(self, folder: Path, logs: Path, options: Sequence[Sequence[str]]) -> None:
        """folder: for Ray's files; its path must be short.  logs: folder for what `ray start` says.
        options: of it, for each node beside the head."""
        self._folder, self._logs = folder, logs
        subnet = f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250)}"
        self._tag = f"dh{secrets.token_hex(3)}"
        self.head_address = f"{subnet}.1"
        gcs_port, redis_port = free_ports(2)
        self.gcs = f"{self.head_address}:{gcs_port}"
        self._redis_port = redis_port
        self.environment = {**os.environ, **_RAY, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.nodes = [
            Node(f"{self._tag}n{number}", f"{subnet}.{number}", wanted)
            for number, wanted in enumerate(options, start=2)
        ]
        self._head: subprocess.Popen[bytes]
        self._redis: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        ip(f"link add {self._tag} type bridge")
        ip(f"addr add {self.head_address}/24 dev {self._tag}")
        ip(f"link set {self._tag} up")
        for node in self.nodes:
            self._connect(node)
        if shutil.which("redis-server") is not None:
            words = f"redis-server --bind {self.head_address} --port {self._redis_port}"
            self._redis = subprocess.Popen(
                [*words.split(), "--protected-mode", "no", "--save", ""],
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._start_head()
        for node in self.nodes:
            self.start(node)
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            self.kill(node)
            ip(f"netns del {node.name}")
        for process in filter(None, (self._head, self._redis)):
            _kill(process)
        ip(f"link del {self._tag}")

    @property
    def has_redis(self) -> bool:
        """True if the state of the GCS outlives its process."""
        return self._redis is not None

    def kill_head(self) -> None:
        """Kill the GCS and all of Ray beside it, and start them anew; only with Redis."""
        assert self.has_redis
        _kill(self._head)
        self._start_head()

    def _start_head(self) -> None:
        for attempt in range(_NUM_ATTEMPTS):
            # Ray would take the raylets for this GCS, for their command lines name its address.
            (self._folder / "ray_current_cluster").unlink(missing_ok=True)
            self._head = self._ray(
                "head",
                [],
                "--head",
                f"--port={self.gcs.rpartition(':')[2]}",
                f"--node-ip-address={self.head_address}",
                "--num-cpus=8",
                "--resources={}",
                f"--temp-dir={self._folder}",
                "--include-dashboard=false",
            )
            if self._is_up("head", self._head, is_last=attempt == _NUM_ATTEMPTS - 1):
                return
            _kill(self._head)

    def start(self, node: Node) -> None:
        """Start a raylet in the node's namespace, and wait until it has joined: of two that start
        at once one may fail, because they choose the names of their sockets alike.  A start
        may also fail while the cluster is busy with the end of the node's last life."""
        node.was_cut_off = False
        for attempt in range(_NUM_ATTEMPTS):
            node.raylet = self._ray(
                node.name,
                ["ip", "netns", "exec", node.name],
                f"--address={self.gcs}",
                f"--node-ip-address={node.address}",
                "--num-cpus=8",
                *node.options,
            )
            if self._is_up(node.name, node.raylet, is_last=attempt == _NUM_ATTEMPTS - 1):
                return
            self.kill(node)

    def kill(self, node: Node) -> None:
        """End all processes of the node at once, as when a machine loses power."""
        ip(f"-n {node.name} link set eth0 down")  # nobody hears that sockets close
        for _ in range(50):
            pids = node.pids()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                break
            time.sleep(0.02)
        node.raylet.wait()
        ip(f"-n {node.name} link set eth0 up")

    def cut(self, source: Node, destination: str) -> None:
        """Lose every packet from `source` to the address; what comes from there still arrives."""
        ip(f"-n {source.name} neigh replace {destination} lladdr {_NOWHERE} nud permanent dev eth0")
        source.away.add(destination)

    def isolate(self, node: Node, *, one_way: bool = False) -> None:
        """Cut the node off from all others; one_way: only what it sends is lost."""
        node.was_cut_off = True
        if not one_way:
            ip(f"-n {node.name} link set eth0 down")
            return
        for address in (self.head_address, *(each.address for each in self.nodes)):
            if address != node.address:
                self.cut(node, address)

    def heal(self, node: Node) -> None:
        """End what `cut` and `isolate` did to the node."""
        for address in node.away:
            # A link that was down has forgotten them.
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(f"-n {node.name} neigh del {address} dev eth0")
        node.away.clear()
        ip(f"-n {node.name} link set eth0 up")

    def pids(self, title: str) -> list[int]:
        """The processes of all nodes, the head too, whose command lines hold `title`."""
        below = _below(self._head.pid)
        found = [each.pid for each in below if title in _command(each.pid)]
        return found + [pid for node in self.nodes for pid in node.pids(title)]

    def _connect(self, node: Node) -> None:
        outer = f"{node.name}v"
        ip(f"netns add {node.name}")
        ip(f"link add {outer} type veth peer name eth0 netns {node.name}")
        ip(f"link set {outer} master {self._tag} up")
        ip(f"-n {node.name} addr add {node.address}/24 dev eth0")
        ip(f"-n {node.name} link set lo up")
        ip(f"-n {node.name} link set eth0 up")

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _ray(self, name: str, prefix: Sequence[str], *options: str) -> subprocess.Popen[bytes]:
        ray = Path(sys.executable).parent / "ray"
        environment = dict(self.environment)
        if name == "head" and self.has_redis:
            environment["RAY_REDIS_ADDRESS"] = f"{self.head_address}:{self._redis_port}"
        with self._log(name).open("wb") as output:
            started = subprocess.Popen(
                [*prefix, str(ray), "start", "--block", "--object-store-memory=80000000", *options],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        share(started.pid, BEFORE_OTHERS)
        return started

    def _is_up(self, name: str, started: subprocess.Popen[bytes], *, is_last: bool) -> bool:
        """Wait until `ray start` has done its work; False if it has failed, an error if that was
        the last attempt."""
        log, end = self._log(name), time.monotonic() + _START_S
        while b"runtime started" not in log.read_bytes():
            if started.poll() is not None and not is_last:
                return False
            assert started.poll() is None, f"`ray start` has failed; see {log}"
            assert time.monotonic() < end, f"Ray did not start in {_START_S:g} s; see {log}"
            time.sleep(0.05)
        share(started.pid, LIKE_OTHERS)
        return True


def _below(pid: int) -> list[psutil.Process]:
    """All processes below one; none if it has ended."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _command(pid: int) -> str:
    """The command line of a process, "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("latin-1")
    except OSError:
        return ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all below it."""
    below = _below(process.pid)
    process.kill()
    for each in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
