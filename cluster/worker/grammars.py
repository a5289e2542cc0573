"""The grammars of a target worker: compiled beside its steps, and hooked into its draws."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np

from cluster.core import TokenArray, TokenTree
from cluster.errors import RequestError
from cluster.grammar.compiler import GrammarCompiler
from cluster.grammar.library import Grammar
from cluster.grammar.mask import MaskRow, mask_words
from cluster.grammar.text import ConstrainedText
from cluster.messages import Open
from cluster.requests.grammar_spec import GrammarSpec
from cluster.worker.texts import TargetText


class GrammarHook:
    """Holds the draws of one request to its grammar: a `LogitsHook`.

    The masks, one for every node, are computed in another thread while the forward pass runs.
    """

    def __init__(self, text: ConstrainedText, executor: Executor) -> None:
        self._text = text
        self._executor = executor
        self._vocab_size = text.vocab_size
        self._masks: Future[MaskRow] | None = None

    def extend(self, token_ids: TokenArray) -> None:
        """See `LogitsHook.extend`."""
        self._settle()
        for token in token_ids.tolist():
            if not self._text.push(token):
                # A library that has given up says so when it is asked what may follow.
                self._text.fill(np.empty(mask_words(self._vocab_size), dtype=np.uint32))
                raise RequestError(
                    f"output token {len(self._text)} is not one that the request's grammar allows; "
                    "resume with the tokens and the grammar of the first stream",
                    param="grammar",
                )

    def prepare(self, tree: TokenTree) -> Sequence[int]:
        """See `LogitsHook.prepare`."""
        self._settle()
        nodes = self._text.possible(tree)
        self._masks = self._executor.submit(self._fill, tree, nodes)
        return nodes

    def masks(self) -> MaskRow:
        """See `LogitsHook.masks`."""
        assert self._masks is not None, "prepare comes first"
        return self._masks.result()

    def _fill(self, tree: TokenTree, nodes: Sequence[int]) -> MaskRow:
        words = mask_words(self._vocab_size)
        rows: MaskRow = np.empty((len(tree) + 1, words), dtype=np.uint32)
        self._text.fill_all(tree, rows)
        return rows if len(nodes) == len(tree) else rows[[0, *(node + 1 for node in nodes)]]

    def _settle(self) -> None:
        """Wait until the other thread is done with the text; drop its result or exception."""
        masks, self._masks = self._masks, None
        if masks is not None:
            masks.exception()


class Grammars:
    """The grammars that the verifier and the links of one target share."""

    def __init__(
        self, compiler: GrammarCompiler, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.compiler = compiler
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._masks: Executor = ThreadPoolExecutor(1, "grammar-masks")
        self._compiling: Executor = ThreadPoolExecutor(1, "grammar-compile")

    def open_hook(self, text: TargetText) -> GrammarHook | None:
        """Return the hook of a text; None without a grammar.

        Raises RequestError with the reason if its grammar cannot be used.
        """
        spec = text.params.grammar
        return None if spec is None else GrammarHook(self.text(spec), self._masks)

    def text(self, spec: GrammarSpec) -> ConstrainedText:
        """Return a new text under that grammar.  Raises RequestError as above."""
        grammar = self.compiler.compile(spec)
        return ConstrainedText(grammar, spec, self._eos_token_ids, self._vocab_size)

    def prepare(self, opened: Open) -> Future[Grammar] | None:
        """Compile the text's grammar beside the steps; returns None if there is nothing to do."""
        spec = opened.params.grammar
        if spec is None or self.compiler.is_ready(spec):
            return None
        return self._compiling.submit(self.compiler.compile, spec)
