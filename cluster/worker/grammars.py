"""The grammars of a target worker: compiled beside its steps, and hooked into its draws."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from cluster.core import VerifyItem
from cluster.grammar.compiler import GrammarCompiler
from cluster.grammar.text import ConstrainedText
from cluster.messages import Open
from cluster.requests.grammar_spec import GrammarSpec
from cluster.worker.grammar_hook import GrammarHook


class Grammars:
    """What the verifier and the links of one target share."""

    def __init__(
        self, compiler: GrammarCompiler, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.compiler = compiler
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._masks: Executor = ThreadPoolExecutor(1, "grammar-masks")
        self._compiling: Executor = ThreadPoolExecutor(1, "grammar-compile")

    def open_hook(self, item: VerifyItem) -> GrammarHook | None:
        """The hook of the request that `item` opens; None without a grammar.

        Raises RequestError with the reason where its grammar cannot be used.
        """
        spec = None if item.params is None else item.params.grammar
        if spec is None:
            return None
        return GrammarHook(self.text(spec), item.prompt_len, self._masks)

    def text(self, spec: GrammarSpec) -> ConstrainedText:
        """A text under that grammar, which has not begun.  Raises RequestError as above."""
        grammar = self.compiler.compile(spec)
        return ConstrainedText(grammar, spec, self._eos_token_ids, self._vocab_size)

    def prepare(self, opened: Open) -> Awaitable[None] | None:
        """What compiles the text's grammar beside the steps; None where nothing is to be done."""
        spec = opened.params.grammar
        if spec is None or self.compiler.is_ready(spec):
            return None
        return self._compile(spec)

    async def _compile(self, spec: GrammarSpec) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._compiling, self.compiler.compile, spec)
