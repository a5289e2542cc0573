"""A process that says which grammars compile.  Each is tried in a fork of its own, which the kernel
ends where it takes too much time or memory; the vocabulary is loaded once, before any fork.

Its standard input is a Unix socket.  Each byte there brings another socket: one end of a pair, on
which one grammar comes, in JSON.  Back come BEGUN and then, unless the fork was ended, the verdict
in JSON: "" for a grammar that compiles, or the reason why it does not.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from cluster.config.parse import parse
from cluster.config.schema import AnswersConfig
from cluster.errors import DrafthouseError
from cluster.grammar.compiler import GrammarCompiler, create_compiler
from cluster.requests.grammar_spec import GrammarSpec

BEGUN = b"\x06"

# Decoding goes before: a grammar is compiled with what it leaves.
_NICENESS = 10
# The limit is processor time, which a busy machine does not stretch; whatever waits instead of
# computing ends after so many times as long.
_PATIENCE = 10.0
_PAGE_BYTES = resource.getpagesize()


def serve(control: socket.socket, compiler: GrammarCompiler, config: AnswersConfig) -> None:
    """Judge what comes until the other end of `control` closes."""
    os.nice(_NICENESS)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the forks
    with suppress(DrafthouseError):  # said by every fork
        compiler.load()
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
            compiler.compile(spec)
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
    with suppress(OSError):  # where there is no such file, memory is not limited
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most = pages * _PAGE_BYTES + config.grammar_memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE * config.grammar_timeout_s)
    signal.setitimer(signal.ITIMER_PROF, config.grammar_timeout_s)


def main() -> None:
    """Arguments, in JSON: the tokenizer's folder, the configuration of answers, the size of the
    vocabulary, and the end-of-sequence tokens."""
    folder, answers, vocab_size, eos_token_ids = json.loads(sys.argv[1])
    config = parse(AnswersConfig, answers)
    compiler = create_compiler(Path(folder), config, vocab_size, eos_token_ids)
    serve(socket.socket(fileno=0), compiler, config)


if __name__ == "__main__":
    main()
