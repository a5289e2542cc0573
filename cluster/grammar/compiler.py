"""Compiles the grammars of requests, once each, and keeps the last ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.config.schema import AnswersConfig
from cluster.errors import ConfigError, DrafthouseError, RequestError
from cluster.models.fingerprint import load_pretrained_tokenizer
from cluster.requests.grammar_spec import GrammarSpec

if TYPE_CHECKING:  # it takes a second to import
    from cluster.grammar.library import Grammar, Library

# Compiled grammars that are kept; those of requests that run stay alive beside them.
_MAX_KEPT = 128


class GrammarCompiler:
    """Thread-safe: a grammar that several threads want at once is compiled by one of them.

    A grammar that cannot be compiled is remembered as well.  The library is loaded with the first
    grammar.
    """

    def __init__(self, load: Callable[[], Library], max_bytes: int) -> None:
        """max_bytes: longer sources are refused."""
        self._load = load
        self._max_bytes = max_bytes
        self._library: Library | None = None
        self._kept: OrderedDict[tuple[str, str], Future[Grammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    def is_ready(self, spec: GrammarSpec) -> bool:
        """True if `compile` would return or raise at once."""
        found = self._kept.get((spec.kind, spec.source))
        return found is not None and found.done()

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises RequestError with the reason where the grammar cannot be used."""
        check_size(spec, self._max_bytes)
        key = spec.kind, spec.source
        future: Future[Grammar] = Future()
        with self._lock:
            found = self._kept.setdefault(key, future)
            self._kept.move_to_end(key)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        if found is future:
            self._settle(future, spec)
        return found.result()

    def _settle(self, future: Future[Grammar], spec: GrammarSpec) -> None:
        try:
            future.set_result(self.load().compile(spec))
        except DrafthouseError as error:
            future.set_exception(error)
        except BaseException:
            future.set_exception(RequestError("the grammar cannot be compiled", param="grammar"))
            raise

    def load(self) -> Library:
        """The library, loaded once.  Raises RequestError where the folder has no tokenizer."""
        with self._loading:
            if self._library is None:
                self._library = self._load()
            return self._library


def check_size(spec: GrammarSpec, max_bytes: int) -> None:
    """Raise RequestError for a source that is longer than max_bytes."""
    size = len(spec.source.encode())
    if size > max_bytes:
        raise RequestError(
            f"the grammar has {size} bytes, the limit is {max_bytes}; shorten it or raise "
            "answers.max_grammar_bytes",
            param="grammar",
        )


def create_compiler(
    tokenizer: Path | Any, config: AnswersConfig, vocab_size: int, eos_token_ids: Sequence[int]
) -> GrammarCompiler:
    """The compiler for a model's vocabulary.

    tokenizer: that of transformers, or the folder that has it.  Loads nothing yet; the first
    grammar raises RequestError where the folder has no tokenizer.
    """

    def load() -> Library:
        try:
            is_folder = isinstance(tokenizer, Path)
            pretrained: Any = load_pretrained_tokenizer(tokenizer) if is_folder else tokenizer
        except ConfigError as error:
            raise RequestError(
                f"grammars are not served: {error.message}", param="grammar"
            ) from error
        own = pretrained.eos_token_id
        ends = sorted({*eos_token_ids, *(() if own is None else (own,))})
        from cluster.grammar.library import Library

        return Library(pretrained, vocab_size, ends)

    return GrammarCompiler(load, config.max_grammar_bytes)
