"""The ranks of a tensor-parallel target other than rank 0: child processes of rank 0's."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

from cluster import logs
from cluster.config.doors import LOOPBACK
from cluster.config.schema import Config
from cluster.errors import WorkerError
from cluster.worker.build import follow_target
from cluster.worker.priority import end_with_parent

log = logging.getLogger(__name__)

T = TypeVar("T")
# A rank's sign of life, and the seconds between two of them, and between two looks for them: those
# are rarer, for a machine may be busy.
_BEAT, _BEAT_S, _LOOK_S = b"\0", 0.25, 0.5
# What ranks have to end in once rank 0's engine is closed, and what the system needs to end one.
_GRACE_S, _KILL_S = 8.0, 1.0


def _free_port() -> int:
    """A port of loopback that nobody uses now; torch's rendezvous binds it a moment later."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


class Ranks:
    """Ranks 1 and up of this process's target; none where it has no tensor parallelism.

    They end with this process, however that ends.
    """

    def __init__(self, config: Config, log_level: str = "INFO") -> None:
        # All on one machine, they talk over loopback: none of them asks who calls.
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        self._leader = f"{LOOPBACK}:{_free_port()}"
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
        loading.add_done_callback(lambda over: over.cancelled() or over.exception())
        watching = asyncio.ensure_future(self.watch())
        try:
            await asyncio.wait((loading, watching), return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                watching.result()
            return await loading
        except BaseException:
            self._kill()
            raise
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
                self._kill()
                raise

    async def end_with_them(self, silence_s: float) -> None:
        """End this process when a rank is lost; see `watch`."""
        try:
            await self.watch(silence_s)
        except WorkerError as error:
            end(error)

    def stop(self) -> None:
        """Wait for the ranks, which end when rank 0's engine is closed; those that do not are
        killed."""
        self._wait(_GRACE_S)
        self._kill()

    def _kill(self) -> None:
        for each in self._followers:
            each.process.kill()
        self._wait(_KILL_S)

    def _wait(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        for each in self._followers:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(max(deadline - time.monotonic(), 0.0))


class _Follower:
    """One rank as its parent sees it."""

    def __init__(self, config: Config, rank: int, leader: str, log_level: str) -> None:
        self._rank, self._num_missed, self._said = rank, 0, b""
        self._link, theirs = socket.socketpair()
        searched = os.pathsep.join(each or os.getcwd() for each in sys.path)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "cluster.worker.ranks"],
                stdin=theirs.fileno(),
                env={**os.environ, "PYTHONPATH": searched},
                process_group=0,  # a terminal's Ctrl-C is for rank 0
            )
        with suppress(OSError):  # it has ended at once, which `look` tells
            self._link.sendall(pickle.dumps((config, rank, leader, log_level)))
        self._link.setblocking(False)

    def look(self, silence_s: float) -> None:
        status, said = self.process.poll(), b""
        with suppress(OSError):
            said = self._link.recv(4096)
        self._num_missed = 0 if said else self._num_missed + 1
        self._said += said.replace(_BEAT, b"")
        why = ""
        if status is None and self._num_missed * _LOOK_S >= silence_s:
            why = f"has said nothing for {silence_s:g} s"
        elif status:  # 0 = rank 0 has closed its engine
            reason = self._said.decode("utf-8", "replace")
            why = f"has ended: {reason or f'status {status}, see the log'}"
        if why:
            raise WorkerError(f"rank {self._rank} of the target {why}")


def end(error: WorkerError) -> NoReturn:
    """End this process at once: its engine may be in a collective that waits for a rank that is
    lost, which nothing else ends soon."""
    log.critical("%s; this process ends", error.message)
    os._exit(1)


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
    end_with_parent(signal.SIGKILL)  # it may be stopped, and beat no more
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides
    config, rank, leader, log_level = pickle.load(sys.stdin.buffer)
    logs.configure(config.log_format, level=log_level)
    threading.Thread(target=_beat, daemon=True).start()
    try:
        follow_target(config, rank, leader)
    except Exception as error:
        from cluster.engine.reminder import in_a_line

        os.write(0, in_a_line(error).encode())
        raise


if __name__ == "__main__":
    main()
