"""Grammars by llguidance: lazy parsing, so compiling takes milliseconds and a mask microseconds.

A grammar is compiled once; every text has a matcher of its own.  Token ids are the target's.
End-of-sequence tokens are no business of a matcher: `cluster.grammar.text` adds them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import llguidance
import numpy as np

from cluster.core import TokenMask
from cluster.errors import RequestError
from cluster.grammar.json_schema import servable
from cluster.grammar.lark import structural_tag_to_lark
from cluster.records import record
from cluster.requests.fields import GrammarSpec

# Without the grammar's source and the parser's state, which are long and may be secrets.
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)
_TERSE = "<non-verbose/>"  # what it writes in their place
# What it says of a grammar whose texts all contradict themselves.
_NO_TEXT = "NoExtensionBias"
_TOO_LARGE = re.compile(r"(?i)too (many|big|large)|; max is|exhausted")
# Whether a grammar is too large is found by going on in it; most are so at their first token.
_STEPS_TRIED = 4
_MAX_REASON_CHARS = 300


class Library:
    """Compiles grammars for one vocabulary; it can be shared between threads."""

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

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises RequestError with the reason, for the author of the grammar."""
        try:
            grammar = _source(spec, self._specials)
        except ValueError as error:
            raise _refusal(str(error)) from None
        found = Grammar(self._tokenizer, grammar)
        for pick in (0, -1):
            self._try(found, pick)
        return found

    def _try(self, grammar: Grammar, pick: int) -> None:
        """Begin a text, of the tokens that stand there among the allowed ones.

        Raises RequestError where the grammar does not get even so far.
        """
        matcher, (row,) = grammar.matcher(), grammar.empty_masks(1)
        for _ in range(_STEPS_TRIED):
            matcher.fill(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            if allowed.size:
                matcher.push(int(allowed[pick]))


class Grammar:
    """A compiled grammar; it can be shared between threads.

    Matchers are copies of one that has seen nothing.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer, source: str) -> None:
        """Raises RequestError for a source that the library refuses."""
        self._make = partial(llguidance.LLMatcher, tokenizer, source, log_level=0, limits=_LIMITS)
        self._root = self._make()
        if self._root.is_error():
            raise _refusal(self._root.get_error())
        self._num_words = -(-tokenizer.vocab_size // 32)

    def empty_masks(self, count: int) -> TokenMask:
        """Room for the masks of so many texts: uint32[count, words of 32 tokens]."""
        return np.empty((count, self._num_words), dtype=np.uint32)

    def matcher(self) -> Matcher:
        """A matcher of a text that has not begun."""
        # Copies share a lexer, which says no to all of them once one of them has used it up.
        tried = self._root.deep_copy()
        tried.compute_bitmask()
        if tried.is_error():
            self._root = self._make()
        return Matcher(self._root.deep_copy())


@record
class Matcher:
    """Where one text stands in its grammar."""

    _matcher: llguidance.LLMatcher

    def push(self, token_id: int) -> bool:
        """Append a token; False, and nothing has changed, where the grammar forbids it.

        Raises RequestError where the grammar takes too much work to go on, now and ever after.
        """
        is_taken = bool(self._matcher.try_consume_tokens([token_id]) == 1)
        if self._matcher.is_error():
            raise _refusal(self._matcher.get_error())
        return is_taken

    def copy(self) -> Matcher:
        """A matcher of a text with the same tokens."""
        return Matcher(self._matcher.deep_copy())

    def may_end(self) -> bool:
        """True if the text so far is complete."""
        return bool(self._matcher.is_accepting())

    def fill(self, row: TokenMask) -> None:
        """Set the bits of the tokens that may follow, and clear the others.  Raises as `push`."""
        matcher = self._matcher
        # A text that is complete has no mask: asking for one would be an error.
        if matcher.is_stopped():
            row[:] = 0
        else:
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            raise _refusal(matcher.get_error())

    def forced(self) -> Sequence[int]:
        """The tokens that must follow, as far as they are certain; none after an end."""
        matcher = self._matcher
        return [] if matcher.is_stopped() else matcher.compute_ff_tokens()


def _source(spec: GrammarSpec, specials: dict[str, int]) -> str:
    """The grammar in a language of llguidance's; raises ValueError for what is no such text."""
    if spec.kind == "json_schema":
        schema = servable(json.loads(spec.source))
        return str(llguidance.LLMatcher.grammar_from_json_schema(schema))
    if spec.kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(spec.source))
    if spec.kind == "choice":
        choices = " | ".join(json.dumps(text) for text in json.loads(spec.source))
        # In a terminal, the library makes a tree of their prefixes; it would try each of a rule.
        return f"start: CHOICE\nCHOICE: {choices}"
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
    size = "it is too large: " if _TOO_LARGE.search(reason) else ""
    told = size + reason.replace(_TERSE, "").replace(_NO_TEXT, "no text fits it")
    short = " ".join(told.split())[:_MAX_REASON_CHARS]
    return RequestError(f"the grammar cannot be used: {short}; change it", param="grammar")
