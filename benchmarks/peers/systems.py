"""The systems that `benchmarks.peers` measures: ours, and peers in separate processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from benchmarks.peers.makers import (
    DRAFT_TOKENS,
    PEERS,
    Programs,
    engine_command,
    environment,
    llama_command,
)
from benchmarks.peers.protocol import READY
from benchmarks.support.answers import Acceptance, Answer, Law, Result
from benchmarks.support.by_hand import Ours, Setup
from benchmarks.support.processes import PinnedProcess, check_idle
from benchmarks.support.prompts import Prompt
from cluster.config.file import load

TRANSFORMERS_MODES = ("plain", "assisted", "lookup")
# llama.cpp's server is asked on a port of this machine; prompts and outputs fit the length.
_PORT = 8156
_MAX_LEN = 2048


class System(Protocol):
    """A system that continues prompts; it uses its cores only between `start` and `stop`."""

    @property
    def processes(self) -> dict[str, PinnedProcess]: ...

    def start(self) -> None: ...

    def run(
        self, prompts: Sequence[Prompt], max_tokens: int, law: Law, concurrency: int, seed: int
    ) -> Result: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """The settings that all systems share.

    target, draft: checkpoint folders.  config, overrides: for our system.  programs: of the peers.
    log: folder for logs.
    """

    target: str
    draft: str
    dtype: str
    cores: tuple[int, ...]
    config: str
    overrides: tuple[str, ...]
    programs: Programs
    max_sequences: int
    log: Path


class Peer:
    """A subprocess that answers JSON lines; see `benchmarks/peers/protocol.py`."""

    def __init__(
        self, name: str, command: Sequence[str], settings: PeerSettings, **environment: str
    ) -> None:
        self._name = name
        self._command = command
        self._settings = settings
        self._environment = environment
        self._process: PinnedProcess | None = None

    @property
    def processes(self) -> dict[str, PinnedProcess]:
        return {self._name: self._process} if self._process else {}

    def start(self) -> None:
        log = self._settings.log / f"{self._name}.log"
        self._process = PinnedProcess(self._command, self._settings.cores, log, self._environment)
        while self._process.read_line() != READY:
            continue

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None

    def run(
        self, prompts: Sequence[Prompt], max_tokens: int, law: Law, concurrency: int, seed: int
    ) -> Result:
        assert self._process is not None, "start it first"
        question = {
            "prompts": [list(prompt.token_ids) for prompt in prompts],
            "max_tokens": max_tokens,
            "temperature": law.temperature,
            "concurrency": concurrency,
            "seed": seed,
        }
        self._process.write_line(json.dumps(question))
        reply = json.loads(self._process.read_line())
        counts = reply["acceptance"]
        return Result(
            tuple(Answer.of(answer) for answer in reply["answers"]),
            Acceptance(**counts) if counts else None,
        )


def system_of(name: str, settings: PeerSettings) -> System:
    """Create the system with that name; raises ValueError for an unknown one.

    ours-plain; ours-all = the drafters of the request's task; ours-A+B = drafters A and B for
    every task; transformers-MODE; the names of `makers.PEERS`.  A suffix @bfloat16 or @float32
    gives it another precision than the others.
    """
    what, _, dtype = name.partition("@")
    family, _, mode = what.partition("-")
    if dtype:
        settings = replace(settings, dtype=dtype)
    if family == "ours" and mode:
        return _ours(name, mode, settings)
    if family == "transformers" and mode in TRANSFORMERS_MODES:
        module = [sys.executable, "-m", "benchmarks.peers.transformers_peer"]
        return Peer(name, [*module, *_peer_words(mode, settings)], settings)
    if family == "llama" and mode in DRAFT_TOKENS[family]:
        server = llama_command(mode, settings.programs, _PORT, settings.max_sequences, _MAX_LEN)
        module = [sys.executable, "-m", "benchmarks.peers.llama_peer", str(_PORT)]
        return Peer(name, [*module, *server], settings)
    if family in DRAFT_TOKENS and mode in DRAFT_TOKENS[family]:
        words = engine_command(
            what, settings.programs, settings.target, settings.draft, settings.dtype,
            settings.max_sequences, _MAX_LEN,
        )  # fmt: skip
        return Peer(name, words, settings, **environment(family, settings.cores))
    raise ValueError(
        f"no system {name!r}; there are ours-plain, ours-all, ours-DRAFTER+DRAFTER, "
        f"transformers-{'|'.join(TRANSFORMERS_MODES)} and {', '.join(PEERS)}, each with "
        "@bfloat16 or @float32 where wanted"
    )


class Turns:
    """Starts and stops systems for their turns."""

    def __init__(self, systems: Mapping[str, System], *, keep_running: bool) -> None:
        self._systems = systems
        self._keep_running = keep_running
        self._started: set[str] = set()

    @contextmanager
    def turn(self, name: str) -> Iterator[System]:
        """Give the system `name` a turn, in which it runs alone."""
        system = self._systems[name]
        try:
            if name not in self._started:
                self._started.add(name)
                system.start()
            others = {
                f"{other} ({role})": process
                for other in self._started - {name}
                for role, process in self._systems[other].processes.items()
            }
            check_idle(others)
            yield system
        finally:
            if not self._keep_running:
                self.stop(name)

    def stop(self, name: str) -> None:
        self._started.discard(name)
        self._systems[name].stop()

    def stop_all(self) -> None:
        for name in list(self._started):
            self.stop(name)


def can_run(name: str, concurrency: int) -> bool:
    """True if the system supports `concurrency`; transformers speculates for one sequence only."""
    return concurrency == 1 or name.partition("@")[0] not in (
        "transformers-assisted",
        "transformers-lookup",
    )


def _ours(name: str, mode: str, settings: PeerSettings) -> Ours:
    overrides = (
        f"target.engine.model={settings.target}",
        f"target.engine.dtype={settings.dtype}",
        f"target.engine.threads={len(settings.cores)}",
        *settings.overrides,
    )
    drafters: tuple[str, ...] = tuple(mode.split("+"))
    if mode == "plain":
        drafters = ()
    elif mode == "all":
        drafters = tuple(load(settings.config, overrides).config.drafters)
    setup = Setup(
        settings.config,
        overrides,
        drafters,
        settings.cores,
        settings.log / name,
        by_task=mode == "all",
    )
    return Ours(setup)


def _peer_words(mode: str, settings: PeerSettings) -> list[str]:
    paths = [os.path.abspath(settings.target), "--draft", os.path.abspath(settings.draft)]
    return [*paths, "--mode", mode, "--dtype", settings.dtype]
