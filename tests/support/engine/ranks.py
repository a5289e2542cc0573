"""Two ranks as processes of their own, for the tests."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cluster.engine import parallel

# Starting two interpreters that import torch on a busy core takes most of it.
TIMEOUT_S = 300


def say(line: str) -> None:
    """What a rank tells the test."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextmanager
def joined(timeout_s: float, loading_s: float = 7200.0) -> Iterator[tuple[int, list[str]]]:
    """Inside, this process is the rank that its first two words say; its number and the others."""
    rank, address, *words = sys.argv[1:]
    torch.set_num_threads(1)
    parallel.init_rank(int(rank), 2, address, timeout_s=timeout_s, loading_s=loading_s)
    yield int(rank), words
    parallel.leave_group()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def two_ranks(module: str, *words: object) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of rank 0 and rank 1, which end with this context.

    Each runs the module of this folder with its rank, their common address and the words.
    """
    command = [sys.executable, "-m", f"{__package__}.{module}"]
    address = free_address()
    processes = [
        subprocess.Popen(
            [*command, rank, address, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in "01"
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
