"""How one model writes what is not its answer: reasoning before it, and calls of tools in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from cluster.core import TokenArray
from cluster.records import frozen
from cluster.requests.fields import GrammarSpec
from cluster.text.answer import AnswerReader, all_text
from cluster.text.prompt import ChatUse
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls.base import CallFormat, Part, Reads, UnreadText
from cluster.text.tool_calls.deepseek import CALLS_BEGIN, DEEPSEEK
from cluster.text.tool_calls.harmony import HARMONY
from cluster.text.tool_calls.hermes import HERMES
from cluster.text.tool_calls.llama3 import LLAMA3
from cluster.text.tool_calls.mistral import MISTRAL

Prompt = Sequence[int] | TokenArray

# The formats of tool calls.  A new one is one file and one entry here.
FORMATS: Mapping[str, CallFormat] = {
    each.name: each for each in (HERMES, LLAMA3, MISTRAL, DEEPSEEK, HARMONY)
}

# Texts that show which format a chat template writes; the first that is found counts.
_SIGNS = (
    ("<|channel|>", HARMONY),
    (CALLS_BEGIN, DEEPSEEK),
    ("[TOOL_CALLS]", MISTRAL),
    ("<tool_call>", HERMES),
    ("<|python_tag|>", LLAMA3),
    ('"parameters": ', LLAMA3),
)


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template writes; None where it shows none."""
    if "tools" not in template:
        return None
    return next((found for sign, found in _SIGNS if sign in template), None)


_HARMONY_ANSWER = "<|channel|>final<|message|>"
# A template that leaves the reasoning out writes both markers at the very end of the prompt.
_NUM_TAIL_TOKENS = 16


@frozen
class ReasoningMarkers:
    """The texts before and after the reasoning, and their tokens.  special_ids: the model's."""

    start: str
    end: str
    start_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()

    def begins_inside(self, prompt_ids: Prompt) -> bool | None:
        """True if the prompt begins the reasoning, False if it ends it too, None if it does
        neither."""
        tail = tuple(prompt_ids[-_NUM_TAIL_TOKENS:])
        started, ended = self._last(tail, self.start_ids), self._last(tail, self.end_ids)
        return None if started == ended else started > ended

    def _last(self, tokens: tuple[int, ...], part: tuple[int, ...]) -> int:
        """Where `part` stands for the last time, and not in a message: a special token ends each.

        -1 where it does not, or is empty."""
        found = (
            at
            for at in range(len(tokens))
            if part
            and tokens[at : at + len(part)] == part
            and self.special_ids.isdisjoint(tokens[at + len(part) :])
        )
        return max(found, default=-1)

    def read(self, source: UnreadText, *, begins_inside: bool | None) -> Reads[None]:
        """Read the reasoning before an answer, if there is any.

        White space before the opening marker and behind the closing one belongs to neither.
        """
        if begins_inside is None:
            at = yield from source.after_space(0)
            if not (yield from source.has(self.start, at)):
                return  # the model answers at once
            source.take(at + len(self.start))
        end = yield from source.until((self.end,), partial(Part, kind="reasoning"))
        source.take(len(end))
        source.take((yield from source.after_space(0)))


def reasoning_style(template: str) -> str | None:
    """The reasoning that a chat template shows: "think", "harmony" or None."""
    if "<|channel|>" in template:
        return "harmony"
    return "think" if "</think>" in template else None


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

    def reader(self, prompt_ids: Prompt, use: ChatUse) -> AnswerReader:
        """Reads one answer to this prompt."""
        if self.is_harmony:
            return AnswerReader(HARMONY.read, use)
        calls = self.calls.read if use.reads_calls and self.calls is not None else all_text
        markers = self.markers
        begun = False if markers is None else markers.begins_inside(prompt_ids)
        if markers is None or begun is False:
            return AnswerReader(calls, use)

        def read(source: UnreadText) -> Reads[None]:
            yield from markers.read(source, begins_inside=begun)
            yield from calls(source)

        return AnswerReader(read, use)


def dialect_of(tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> Dialect:
    """The dialect of a model.  tool_parser, reasoning_parser: as in the section `answers`."""
    template = tokenizer.chat_template
    calls = format_of(template) if tool_parser == "auto" else FORMATS.get(tool_parser)
    style = reasoning_style(template) if reasoning_parser == "auto" else reasoning_parser
    is_harmony = "harmony" in (style, calls.name if calls else "")

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).tolist())

    special_ids, markers = tokenizer.special_ids, None
    if is_harmony or style == "think":
        start, end = ("", _HARMONY_ANSWER) if is_harmony else ("<think>", "</think>")
        markers = ReasoningMarkers(start, end, ids(start), ids(end), special_ids)
    specials = frozenset(map(tokenizer.token_text, special_ids)) - {""}
    return Dialect(calls, markers, is_harmony, template, specials)
