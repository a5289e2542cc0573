"""Whether the grammar of a request can be compiled, asked before anything is queued for it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from cluster.config.schema import AnswersConfig
from cluster.errors import RequestError
from cluster.grammar.compiler import GrammarCompiler, check_size
from cluster.requests.grammar_spec import GrammarSpec

# A grammar that never ends occupies one of them.
_NUM_THREADS = 2


class GrammarCheck:
    """Compiles off the event loop, for a limited time."""

    def __init__(self, compiler: GrammarCompiler, config: AnswersConfig) -> None:
        self._compiler = compiler
        self._config = config
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "grammar-check")

    async def check(self, grammar: GrammarSpec | None) -> None:
        """Raise RequestError where the targets could not use this grammar."""
        if grammar is None:
            return
        check_size(grammar, self._config.max_grammar_bytes)
        if self._compiler.is_ready(grammar):
            self._compiler.compile(grammar)
            return
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._compiler.load)
        compiling = loop.run_in_executor(self._threads, self._compiler.compile, grammar)
        try:
            async with asyncio.timeout(self._config.grammar_timeout_s):
                await asyncio.shield(compiling)
        except TimeoutError:
            compiling.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise RequestError(
                f"the grammar has not compiled within {self._config.grammar_timeout_s:g} s; make "
                "it simpler or raise answers.grammar_timeout_s",
                param="grammar",
            ) from None
