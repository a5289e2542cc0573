"""Starts a Drafthouse server, sends requests over HTTP and reads its metrics."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from benchmarks.support.record import ROOT
from cluster.records import frozen
from deployments.metrics_reader import Page

READY = "Drafthouse is ready:"


@frozen
class Server:
    """A server's address and process id (0 if it was started elsewhere)."""

    url: str
    process_id: int = 0

    def client(self, timeout_s: float = 300.0) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
        return httpx.AsyncClient(base_url=self.url, timeout=timeout_s, limits=limits)

    def model(self) -> str:
        """The name that requests use."""
        models = httpx.get(f"{self.url}/v1/models", timeout=30).json()
        return str(models["data"][0]["id"])

    def page(self) -> Page:
        """What /metrics says now."""
        return Page.read(httpx.get(f"{self.url}/metrics", timeout=30).text)


_ANEW = "coordinator.keep_learned=false"


@contextmanager
def running(
    config: str,
    overrides: Sequence[str] = (),
    url: str | None = None,
    *,
    root: Path = ROOT,
    log: Path | None = None,
) -> Iterator[Server]:
    """The server at `url`, or one started from `config` and stopped at the end of the block.

    A started server has learned nothing from former runs, and its first minute counts too.  root:
    of the checkout that is started.  log: a file for what it says on standard error; None = here.
    """
    if url is not None:
        yield Server(url.rstrip("/"))
        return
    command = [sys.executable, "-m", "deployments.cli", "serve", config]
    for override in (_ANEW, *overrides):
        command += ["--set", override]
    environment = None if root == ROOT else {**os.environ, "PYTHONPATH": str(root)}
    with ExitStack() as stack:
        said = None if log is None else stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=said, text=True
        )
        try:
            yield Server(_wait_until_ready(process), process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)


def _wait_until_ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(READY):
            address = re.search(r"http://[\w.]+:\d+", line)
            assert address is not None, line
            return address.group()
    raise SystemExit(f"the server ended with status {process.wait()} before it was ready")
