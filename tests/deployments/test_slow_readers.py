"""Clients that read fifty bytes a second cost bounded memory and nobody's time.

DRAFTHOUSE_SLOW_READERS says how many there are; a nightly run sets it to 1000.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config.schema import Config, CoordinatorConfig
from tests.support.clock import wait_until
from tests.support.deployments import slow_readers
from tests.support.deployments.scripted import Scripted, scripted
from tests.support.text.tokenizers_for_tests import byte_level_folder

NUM_READERS = int(os.environ.get("DRAFTHOUSE_SLOW_READERS", "0"))
# An event has some 250 bytes: far more than uvicorn and the kernel buffer, and hours of reading.
MAX_TOKENS = 600
PATIENCE_S = 500.0
# uvicorn's buffer of 64 KiB, the text that it is about to write, and the request itself.
MAX_BYTES_PER_READER = 400 * 1024


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Scripted]:
    config = Config(
        model_name="toy", coordinator=CoordinatorConfig(max_queued_requests=NUM_READERS)
    )
    with scripted(byte_level_folder(tmp_path), config, max_running_sequences=64) as place:
        yield place


@contextmanager
def reading(server: Scripted) -> Iterator[subprocess.Popen[str]]:
    words = [server.port, NUM_READERS, NUM_READERS / 100.0, MAX_TOKENS]
    process = subprocess.Popen(
        [sys.executable, slow_readers.__file__, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    return json.loads(process.stdout.readline())


def asked_s(server: Scripted, count: int) -> float:
    """The longest of `count` ordinary answers, one after another."""
    body = {"model": "toy", "prompt": [1, 2], "max_tokens": 32, "ignore_eos": True}
    longest = 0.0
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        for _ in range(count):
            started_at = time.monotonic()
            answer = client.post("/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 32
            longest = max(longest, time.monotonic() - started_at)
    return longest


@pytest.mark.skipif(not NUM_READERS, reason="asked by night")
def test_slow_readers_hold_up_neither_the_rounds_nor_others(server: Scripted):
    alone_s, before = asked_s(server, 20), resident_bytes()
    with reading(server) as readers:
        first = said(readers)
        assert first["num_started"] == NUM_READERS
        # Every answer is decoded while its reader has hardly begun: the rounds wait for nobody.
        wait_until(lambda: not server.num_running(), PATIENCE_S)
        beside_s = asked_s(server, 20)
        per_reader = (resident_bytes() - before) / NUM_READERS
        readers.stdin.write("enough\n")
        readers.stdin.flush()
        last = said(readers)
    assert last["num_ended"] == 0  # nobody was cut off, and nobody is done
    assert last["num_bytes"] < NUM_READERS * MAX_TOKENS * 100
    times = {"alone_s": alone_s, "beside_s": beside_s, "bytes_per_reader": per_reader}
    sys.stdout.write(json.dumps({**first, **last, **times}) + "\n")  # shown by pytest -rP
    assert first["first_byte_s"] < 1.0
    assert beside_s < 2.0 * alone_s + 0.1
    assert per_reader < MAX_BYTES_PER_READER
