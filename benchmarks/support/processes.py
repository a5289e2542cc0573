"""Processes for benchmarks: pinned to cores, stopped with their children."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.support.record import ROOT
from deployments.supervisor import is_living

_STOP_S = 30.0
_READY = " ready: "


class PinnedProcess:
    """A child process in its own process group on `cores`, with line-based stdin and stdout."""

    def __init__(
        self,
        command: Sequence[str],
        cores: Sequence[int],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        is_read: bool = True,
    ) -> None:
        """log: file for its stderr; and for its stdout, where nobody reads it."""
        pinned = ["taskset", "-c", ",".join(map(str, cores)), *command]
        threads = {"OMP_NUM_THREADS": str(len(cores))}
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                pinned,
                cwd=ROOT,
                env={**os.environ, **threads, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if is_read else errors,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def write_line(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def read_line(self) -> str:
        """The next line of stdout; raises RuntimeError with the end of the log if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return line.rstrip("\n")
        status = self._process.wait()
        raise RuntimeError(f"process ended with status {status}; {self.last_words()}")

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def last_words(self) -> str:
        """The end of its log."""
        tail = self._log.read_text("utf-8", "replace").splitlines()[-8:]
        return f"{self._log} says:\n" + "\n".join(tail)

    def ready_address(self) -> str:
        """Wait for the line in which one of our processes says that it is ready, and where."""
        while _READY not in (line := self.read_line()):
            continue
        return line.partition(_READY)[2].strip()

    def cpu_s(self) -> float:
        """CPU seconds used so far by the process and its living descendants."""
        process, used_s = psutil.Process(self._process.pid), 0.0
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                used_s += times.user + times.system
        return used_s

    def pause(self) -> None:
        """Pause its process group (SIGSTOP) until `resume`; no error if it has ended."""
        self._signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_group(signal.SIGCONT)

    def kill(self) -> None:
        """End its process group by SIGKILL, without waiting."""
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def stop(self, patience_s: float = _STOP_S) -> None:
        """Send SIGTERM, later SIGKILL; returns when it and its descendants have ended."""
        children = []
        if self.is_running:
            children = psutil.Process(self._process.pid).children(recursive=True)
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        # A peer's workers may outlive it briefly and would use the cores of the next system.
        deadline = time.monotonic() + patience_s
        while alive := [child for child in children if is_living(child)]:
            if time.monotonic() > deadline:
                for child in alive:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            time.sleep(0.02)


def run_to_end(
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    log: Path,
    timeout_s: float,
) -> tuple[int | None, str]:
    """Run a command in a folder; returns its exit status, None if it took too long, and its output,
    which is in the log.  Everything that it started has ended then."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, log.read_text("utf-8", "replace")


def exit_on_sigterm() -> None:
    """Let SIGTERM end this process like any exit, so that what it started is stopped too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
