"""Grammars by llguidance: lazy parsing, so compiling takes milliseconds and a mask microseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance

from cluster.errors import RequestError
from cluster.grammar.base import MaskRow, refusal
from cluster.grammar.lark import JSON_LAYOUT, structural_tag_to_lark
from cluster.requests.grammar_spec import GrammarSpec

# Without the grammar's source and the parser's state, which are long and may be secrets.
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)
_TERSE = "<non-verbose/>"  # what it writes in their place


class LlguidanceBackend:
    """A `cluster.grammar.base.Backend`."""

    def __init__(self, pretrained: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """pretrained: the transformers tokenizer.  vocab_size: the model's, padding included."""
        backend = pretrained.backend_tokenizer
        self._tokenizer = llguidance.LLTokenizer(
            backend.to_str(), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
        )
        self._specials = {
            token.content: token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }

    def compile(self, spec: GrammarSpec) -> LlguidanceGrammar:
        """Raises RequestError with the reason."""
        try:
            grammar = _source(spec, self._specials)
            root = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        except ValueError as error:
            raise _refusal(str(error)) from None
        if root.is_error():
            raise _refusal(root.get_error())
        return LlguidanceGrammar(root)


class LlguidanceGrammar:
    """A `Grammar`: matchers are copies of one that has seen nothing."""

    def __init__(self, root: llguidance.LLMatcher) -> None:
        self._root = root

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._root.deep_copy())


class LlguidanceMatcher:
    """A `Matcher`."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def push(self, token_id: int) -> bool:
        is_taken = bool(self._matcher.try_consume_tokens([token_id]) == 1)
        if self._matcher.is_error():
            raise _refusal(self._matcher.get_error())
        return is_taken

    def pop(self, count: int) -> None:
        self._matcher.rollback(count)

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    def fill(self, row: MaskRow) -> None:
        matcher = self._matcher
        # A text that is complete has no mask: asking for one would be an error.
        if matcher.is_stopped() and not matcher.is_error():
            row[:] = 0
            return
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            raise _refusal(matcher.get_error())

    def forced(self) -> Sequence[int]:
        matcher = self._matcher
        return [] if matcher.is_stopped() else matcher.compute_ff_tokens()


def _source(spec: GrammarSpec, specials: dict[str, int]) -> str:
    """The grammar in a language of llguidance's; raises ValueError for what is no such text."""
    if spec.kind == "json_schema":
        return str(llguidance.LLMatcher.grammar_from_json_schema(spec.source, None, JSON_LAYOUT))
    if spec.kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(spec.source))
    if spec.kind == "choice":
        choices = " | ".join(json.dumps(text) for text in json.loads(spec.source))
        return f"start: {choices}"
    if spec.kind == "structural_tag":
        return structural_tag_to_lark(json.loads(spec.source), specials)
    if spec.kind == "grammar":
        return to_lark(spec.source)
    raise ValueError(f"{spec.kind[:40]!r} is no kind of grammar")


def to_lark(source: str) -> str:
    """A grammar of a request, in Lark: GBNF is recognised by its `::=`."""
    if "::=" not in source:
        return source
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(source))
    except Exception as error:  # noqa: BLE001 - it raises nothing more special
        raise ValueError(str(error)) from None


def _refusal(reason: str) -> RequestError:
    return refusal(reason.replace(_TERSE, ""))
