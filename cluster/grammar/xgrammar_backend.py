"""Grammars by xgrammar: compiled ahead, which takes longer; the optional extra `xgrammar`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.errors import ConfigError
from cluster.grammar.base import MaskRow, refusal
from cluster.requests.grammar_spec import GrammarSpec

_CACHE_BYTES = 64 * 1024 * 1024


class XgrammarBackend:
    """A `cluster.grammar.base.Backend`."""

    def __init__(self, pretrained: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """As `LlguidanceBackend`.  Raises ConfigError where the library is not installed."""
        try:
            import xgrammar
        except ImportError as error:
            raise ConfigError(
                f"answers.grammar_backend: xgrammar is not installed ({error}); "
                "pip install drafthouse[xgrammar], or set llguidance"
            ) from None
        self._library: Any = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(
            pretrained, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids) or None
        )
        self._info = info
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=1, cache_limit_bytes=_CACHE_BYTES
        )
        self._tokenizer = pretrained.backend_tokenizer

    def compile(self, spec: GrammarSpec) -> XgrammarGrammar:
        """Raises RequestError with the reason."""
        try:
            compiled = self._compiled(spec)
        except (ValueError, RuntimeError, TypeError) as error:  # its own errors are RuntimeErrors
            raise refusal(str(error)) from None
        return XgrammarGrammar(self._library, compiled, self._tokenizer)

    def _compiled(self, spec: GrammarSpec) -> Any:
        library, compiler, source = self._library, self._compiler, spec.source
        if spec.kind == "json_schema":
            # Strict mode would forbid properties that the schema does not.
            return compiler.compile_json_schema(
                source, any_whitespace=False, separators=(", ", ": "), strict_mode=False
            )
        if spec.kind == "regex":
            return compiler.compile_regex(source)
        if spec.kind == "choice":
            choices = " | ".join(json.dumps(text) for text in json.loads(source))
            return compiler.compile_grammar(f"root ::= {choices}")
        if spec.kind == "structural_tag":
            tag = json.loads(source)
            if isinstance(tag, dict) and "format" in tag:
                tag = {**tag, "format": _with_little_space(tag["format"])}
            return compiler.compile_structural_tag(tag)
        if spec.kind == "grammar" and "::=" in source:
            return compiler.compile_grammar(source)
        if spec.kind == "grammar":
            return compiler.compile_grammar(
                library.Grammar.from_lark(source, tokenizer_info=self._info)
            )
        raise ValueError(f"{spec.kind[:40]!r} is no kind of grammar")


def _with_little_space(value: Any) -> Any:
    """A format whose JSON has single spaces at most: a model may else write spaces for ever."""
    if isinstance(value, list):
        return [_with_little_space(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "json_schema":
        return {"max_whitespace_cnt": 1, **value}
    return {key: _with_little_space(each) for key, each in value.items()}


class XgrammarGrammar:
    """A `Grammar`."""

    def __init__(self, library: Any, compiled: Any, tokenizer: Any) -> None:
        self._library = library
        self._compiled = compiled
        self._tokenizer = tokenizer

    def matcher(self) -> XgrammarMatcher:
        return XgrammarMatcher(self._library.GrammarMatcher(self._compiled), self._tokenizer)


class XgrammarMatcher:
    """A `Matcher`."""

    def __init__(self, matcher: Any, tokenizer: Any) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer

    def push(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def pop(self, count: int) -> None:
        self._matcher.rollback(count)

    def may_end(self) -> bool:
        return bool(self._matcher.is_completed())

    def fill(self, row: MaskRow) -> None:
        row[:] = np.uint32(0xFFFFFFFF)  # it is left alone where everything is allowed
        self._matcher.fill_next_token_bitmask(row.view(np.int32).reshape(1, -1), 0)

    def forced(self) -> Sequence[int]:
        text = self._matcher.find_jump_forward_string()
        if not text:
            return []
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        # The last token may go on into what follows.
        return ids[:-1]
