"""How one model writes what is not its answer: reasoning before it, and calls of tools in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.core import TokenArray
from cluster.records import frozen
from cluster.requests.fields import GrammarSpec
from cluster.text.reasoning import (
    MARKERS,
    ReasoningMarkers,
    ReasoningSplitter,
    reasoning_style,
)
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls.base import CallFormat, CallParser, Part, Said
from cluster.text.tool_calls.registry import FORMATS, format_of

Prompt = Sequence[int] | TokenArray

_HARMONY_ANSWER = "<|channel|>final<|message|>"


@frozen
class Dialect:
    """Of one model.  calls: the format of its tool calls, None = it has none.

    markers: of its reasoning, None = it has none.  is_harmony: messages in channels hold both.
    template: the source of its chat template.  special_texts: those of its special tokens.
    """

    calls: CallFormat | None = None
    markers: ReasoningMarkers | None = None
    is_harmony: bool = False
    template: str = ""
    special_texts: frozenset[str] = frozenset()

    def shows_specials(self, *, with_calls: bool) -> bool:
        """True if special tokens must be in the text that is read."""
        if self.is_harmony:
            return True
        texts = [] if self.markers is None else [self.markers.start, self.markers.end]
        if with_calls and self.calls is not None:
            texts += [self.calls.trigger, self.calls.begin, *self.calls.tags("")]
        return any(special in text for special in self.special_texts for text in texts)

    def held_to(self, grammar: GrammarSpec | None, prompt_ids: Prompt) -> GrammarSpec | None:
        """The grammar of an answer to this prompt: from the end of the reasoning on."""
        if grammar is None or self.markers is None or not self.markers.end_ids:
            return grammar
        begun = self.markers.begins_inside(prompt_ids)
        if begun is False:
            return grammar
        # Channels always begin with one, whatever the prompt says.
        start = () if begun or self.is_harmony else self.markers.start_ids
        return replace(grammar, reasoning_start=start, reasoning_end=self.markers.end_ids)

    def reader(self, prompt_ids: Prompt, *, with_calls: bool) -> AnswerReader:
        """Reads one answer to this prompt."""
        if self.is_harmony:
            return AnswerReader(None, FORMATS["harmony"].parser())
        splitter = None
        if self.markers is not None:
            inside = self.markers.begins_inside(prompt_ids)
            splitter = ReasoningSplitter(self.markers, begins_inside=inside)
        parser = self.calls.parser() if with_calls and self.calls is not None else None
        return AnswerReader(splitter, parser)


class AnswerReader:
    """Takes reasoning and calls out of the text of an answer, piece by piece."""

    def __init__(self, splitter: ReasoningSplitter | None, parser: CallParser | None) -> None:
        self._splitter = splitter
        self._parser = parser

    def push(self, text: str) -> list[Part]:
        """The parts that new text brings, in its order."""
        if self._splitter is None:
            return self._answered(text)
        text, reasoning = self._splitter.push(text)
        return [*_thought(reasoning), *self._answered(text)]

    def finish(self) -> list[Part]:
        """End the text; returns the parts that were held back."""
        parts: list[Part] = []
        if self._splitter is not None:
            text, reasoning = self._splitter.finish()
            parts = [*_thought(reasoning), *self._answered(text)]
        return parts if self._parser is None else [*parts, *self._parser.finish()]

    def _answered(self, text: str) -> list[Part]:
        if self._parser is not None:
            return self._parser.push(text)
        return [Said(text)] if text else []


def _thought(text: str) -> list[Part]:
    return [Said(text, is_reasoning=True)] if text else []


def dialect_of(tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> Dialect:
    """The dialect of a model.  tool_parser, reasoning_parser: as in the section `answers`."""
    template = tokenizer.chat_template
    calls = format_of(template) if tool_parser == "auto" else FORMATS.get(tool_parser)
    style = reasoning_style(template) if reasoning_parser == "auto" else reasoning_parser
    is_harmony = "harmony" in (style, calls.name if calls else "")

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).tolist())

    markers = None
    if is_harmony:
        markers = ReasoningMarkers("", _HARMONY_ANSWER, (), ids(_HARMONY_ANSWER))
    elif style is not None and style in MARKERS:
        start, end = MARKERS[style]
        markers = ReasoningMarkers(start, end, ids(start), ids(end))
    specials = frozenset(tokenizer.token_text(each) for each in tokenizer.special_ids) - {""}
    return Dialect(calls, markers, is_harmony, template, specials)
