"""Compiles the grammars of requests, once each, and keeps the last ones."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from cluster.config.parse import parse
from cluster.config.schema import AnswersConfig
from cluster.errors import ConfigError, DrafthouseError, RequestError
from cluster.grammar.text import ConstrainedText, GrammarHook
from cluster.models.fingerprint import load_pretrained_tokenizer
from cluster.requests.fields import GrammarSpec

if TYPE_CHECKING:
    from cluster.grammar.library import Grammar, Library


# Compiled grammars that are kept; those of requests that run stay alive beside them.
_MAX_KEPT = 128


class GrammarCompiler:
    """Thread-safe: a grammar that several threads want at once is compiled once.

    A grammar that cannot be compiled is remembered as well.  The library is loaded with the first
    grammar.
    """

    def __init__(
        self, folder: Path, config: AnswersConfig, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """folder: of the model, whose vocabulary and ends these are."""
        self._folder, self._max_bytes = folder, config.max_grammar_bytes
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        executor = ThreadPoolExecutor(1, "grammar-compile")
        self._submitted = lru_cache(_MAX_KEPT)(lambda spec: executor.submit(self._compiled, spec))
        self._lock = threading.Lock()

    @cached_property
    def library(self) -> Library:
        """Raises RequestError where the folder has no tokenizer."""
        try:
            pretrained = load_pretrained_tokenizer(self._folder)
        except ConfigError as error:
            raise RequestError(
                f"grammars are not served: {error.message}", param="grammar"
            ) from error
        ends = sorted({*self._eos_token_ids, pretrained.eos_token_id} - {None})
        from cluster.grammar.library import Library

        return Library(pretrained, self._vocab_size, ends)

    def prepare(self, spec: GrammarSpec) -> Future[Grammar]:
        """Have a grammar compiled in another thread, unless it is.  Raises RequestError for one
        that is too large."""
        check_size(spec, self._max_bytes)
        with self._lock:
            return self._submitted(spec)

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises RequestError with the reason where the grammar cannot be used."""
        return self.prepare(spec).result()

    def _compiled(self, spec: GrammarSpec) -> Grammar:
        try:
            return self.library.compile(spec)
        except DrafthouseError:
            raise
        except Exception as error:
            raise RequestError("the grammar cannot be compiled", param="grammar") from error

    def text(self, spec: GrammarSpec) -> ConstrainedText:
        """A text under that grammar that has not begun.  Raises as `compile`."""
        return ConstrainedText(self.compile(spec), spec, self._eos_token_ids)

    def hook(self, spec: GrammarSpec | None) -> GrammarHook | None:
        """What holds a text's draws to its grammar; None without one.  Raises as `compile`."""
        return None if spec is None else GrammarHook(self.text(spec))


def check_size(spec: GrammarSpec, max_bytes: int) -> None:
    """Raise RequestError for a source that is longer than max_bytes."""
    size = len(spec.source.encode())
    if size > max_bytes:
        raise RequestError(
            f"the grammar has {size} bytes, the limit is {max_bytes}; shorten it or raise "
            "answers.max_grammar_bytes",
            param="grammar",
        )


# A process that says which grammars compile. Each is tried in a fork of its own, which the kernel
# ends where it takes too much time or memory; the vocabulary is loaded once, before any fork.
#
# Its standard input is a Unix socket. Each byte there brings another socket: one end of a pair,
# on which one grammar comes, in JSON. Back come BEGUN and then, unless the fork was ended, the
# verdict in JSON: "" for a grammar that compiles, or the reason why it does not.


BEGUN = b"\x06"

# Decoding goes before: a grammar is compiled with what it leaves.
_NICENESS = 10
# The limit is processor time, which a busy machine does not stretch; whatever waits instead of
# computing ends after so many times as long.
_PATIENCE = 10.0


def serve(control: socket.socket, compiler: GrammarCompiler, config: AnswersConfig) -> None:
    """Judge what comes until the other end of `control` closes."""
    os.nice(_NICENESS)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the forks
    with suppress(DrafthouseError):  # said by every fork
        compiler.library  # noqa: B018
    while True:
        byte, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not byte:
            return
        with socket.socket(fileno=descriptors[0]) as peer:
            if os.fork() == 0:
                _judge(peer, compiler, config)


def _judge(peer: socket.socket, compiler: GrammarCompiler, config: AnswersConfig) -> None:
    """Answer for one grammar, and end this process."""
    try:
        # Libraries write of grammars that they do not like; those are clients' texts.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        with peer.makefile("rb") as file:
            spec = GrammarSpec(*json.load(file))
        _limit(config)
        peer.sendall(BEGUN)
        try:
            compiler.library.compile(spec)  # here: a thread would need memory of its own
            verdict = ""
        except DrafthouseError as error:
            verdict = error.message
        peer.sendall(json.dumps(verdict).encode())
    finally:
        os._exit(0)


def _limit(config: AnswersConfig) -> None:
    """From now on the kernel ends this process where it takes more than the configuration allows.

    Signals whose default is to end a process do so in the midst of native code, too.
    """
    most = psutil.Process().memory_info().vms + config.grammar_memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE * config.grammar_timeout_s)
    signal.setitimer(signal.ITIMER_PROF, config.grammar_timeout_s)


def main() -> None:
    """Arguments, in JSON: the tokenizer's folder, the configuration of answers, the size of the
    vocabulary, and the end-of-sequence tokens."""
    folder, answers, vocab_size, eos_token_ids = json.loads(sys.argv[1])
    config = parse(AnswersConfig, answers)
    compiler = GrammarCompiler(Path(folder), config, vocab_size, eos_token_ids)
    serve(socket.socket(fileno=0), compiler, config)


if __name__ == "__main__":
    main()
