"""The ranks of a tensor-parallel target other than rank 0: child processes of rank 0's."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

from cluster import logs
from cluster.config.addresses import LOOPBACK, free_port
from cluster.config.schema import Config
from cluster.errors import DrafthouseError, WorkerError
from cluster.rpc.server import LOG_FORMAT
from cluster.worker.build import follow_target

T = TypeVar("T")
# A rank says so often that it lives; a machine may be busy, so nobody looks as often.
_BEAT, _BEAT_S, _LOOK_S = b"\0", 0.25, 0.5
# What ranks have to end in once rank 0's engine is closed.
_GRACE_S = 10.0


class Ranks:
    """Ranks 1 and up of this process's target; none where it has no tensor parallelism.

    They end with this process, however that ends.
    """

    def __init__(self, config: Config, log_level: str = "INFO") -> None:
        # All on one machine, they talk over loopback: none of them asks who calls.
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        self._leader = f"{LOOPBACK}:{free_port()}"
        self._followers = [
            _Follower(config, rank, self._leader, log_level)
            for rank in range(1, config.target.engine.tensor_parallel)
        ]

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._followers]

    async def load(self, load: Callable[[str], T]) -> T:
        """What `load` returns in a thread, called with the host:port at which rank 0 gathers all.

        Raises WorkerError as soon as a rank ends before that: whoever waits for it inside a
        collective would otherwise wait for as long as loading may take."""
        loading = asyncio.ensure_future(asyncio.to_thread(load, self._leader))
        watching = asyncio.ensure_future(self.watch())
        try:
            await asyncio.wait((loading, watching), return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                watching.result()
            return await loading
        finally:
            watching.cancel()

    async def watch(self, silence_s: float = math.inf) -> None:
        """Raise WorkerError when a rank has ended, or has said nothing for so long; the others are
        ended then, for each may be in a collective that waits for it.

        Looks are counted, not time: who was stopped itself has heard nobody meanwhile."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                for each in self._followers:
                    each.look(silence_s)
            except WorkerError:
                self.stop(0.0)
                raise

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """Wait for the ranks, which end when rank 0's engine is closed; those that do not are
        killed."""
        for each in self._followers:
            each.stop(grace_s)


class _Follower:
    """One rank as its parent sees it."""

    def __init__(self, config: Config, rank: int, leader: str, log_level: str) -> None:
        self._rank, self._num_missed = rank, 0
        self._link, theirs = socket.socketpair()
        found_at = os.pathsep.join(filter(None, sys.path))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cluster.worker.ranks"],
                stdin=theirs.fileno(),
                env={**os.environ, "PYTHONPATH": found_at},
            )
        with suppress(OSError):  # it has ended at once, which `look` tells
            self._link.sendall(pickle.dumps((config, rank, leader, log_level)))
        self._link.setblocking(False)

    def look(self, silence_s: float) -> None:
        status, said = self.process.poll(), b""
        with suppress(OSError):
            said = self._link.recv(4096)
        self._num_missed = 0 if said else self._num_missed + 1
        why = ""
        if status is None and self._num_missed * _LOOK_S >= silence_s:
            why = f"has said nothing for {silence_s:g} s"
        elif status:  # 0 = rank 0 has closed its engine
            reason = said.replace(_BEAT, b"").decode("utf-8", "replace")
            why = f"has ended: {reason or f'status {status}, see the log'}"
        if why:
            raise WorkerError(f"rank {self._rank} of the target {why}; the target starts anew")

    def stop(self, grace_s: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        self.process.kill()
        self.process.wait()
        self._link.close()


def _beat() -> NoReturn:
    """Tell the parent that this process lives; end it when nobody is there to be told."""
    try:
        while True:
            os.write(0, _BEAT)
            time.sleep(_BEAT_S)
    finally:
        os._exit(1)


def main() -> None:
    """Be the rank that standard input names; returns when rank 0 has closed its engine."""
    config, rank, leader, log_level = pickle.load(sys.stdin.buffer)
    logs.configure(config.log_format, LOG_FORMAT, log_level)
    threading.Thread(target=_beat, daemon=True).start()
    try:
        follow_target(config, rank, leader)
    except DrafthouseError as error:
        os.write(0, error.message.encode())
        sys.exit(error.message)


if __name__ == "__main__":
    main()
