"""What all APIs write in formats of their own: an answer as items, which are texts, reasonings and
calls, each of which grows until the next one begins; and its cost, in tokens, times and statistics
of speculation, with tables of the latter two for the pages and for /openapi.json."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.core import TokenLogprob
from cluster.errors import DrafthouseError
from cluster.records import record
from cluster.requests.idle import MEANINGS
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls.base import NOTHING
from deployments.ingress.choice import Delta, PromptLogprobs
from deployments.ingress.generation import Generation
from deployments.ingress.wording import JsonObject, Rule


@dataclass(slots=True)
class OutputItem:
    """kind: text, reasoning, function or custom: what is called.  name: of that.

    status, logprobs: for formats that tell of them."""

    kind: str
    index: int
    name: str = ""
    text: str = ""
    is_complete: bool = False
    status: str = "in_progress"
    logprobs: list[JsonObject] = field(default_factory=list)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def is_call(self) -> bool:
        return self.kind in ("function", "custom")

    @property
    def call_id(self) -> str:
        return f"call_{self.mark[:24]}"

    def call(self) -> JsonObject:
        """The call as chats have it."""
        given = "input" if self.kind == "custom" else "arguments"
        said = {"name": self.name, given: self.text}
        return {"id": self.call_id, "type": self.kind, self.kind: said}


News = Iterator[tuple[str, OutputItem, str]]


def grow(items: list[OutputItem], delta: Delta) -> News:
    """Grow the items of an answer; yields each that has ended, begun or grown, by what."""
    part = delta.part
    if part == NOTHING:
        return
    if part.name is not None or not items or items[-1].kind != part.kind:  # it begins
        if items:
            yield "ended", items[-1], ""
        items.append(OutputItem(part.kind, len(items), part.name or ""))
        yield "begun", items[-1], ""
    items[-1].text += part.text
    items[-1].is_complete = part.is_end
    yield "grown", items[-1], part.text


@dataclass
class Writer:
    """Writes one answer in the format of one endpoint: `whole`, or the others in their order."""

    _request: Any
    _generation: Generation
    _request_id: str
    _created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The answer to a request without `stream`."""
        raise NotImplementedError

    def opening(self) -> bytes:
        """The events before the first token."""
        raise NotImplementedError

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """The events for what is new."""
        raise NotImplementedError

    def closing(self) -> bytes:
        """The events that end a stream without errors."""
        raise NotImplementedError

    def failing(self, error: DrafthouseError) -> bytes:
        """The events that end a stream with an error instead."""
        raise NotImplementedError


@dataclass
class ItemWriter(Writer):
    """Writes an answer that is told item by item."""

    _items: list[OutputItem] = field(default_factory=list)
    _last: Delta = field(init=False)

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        events = []
        for delta in deltas:
            self._take(delta)
            events += [self._told(*news) for news in grow(self._items, delta)]
        return b"".join(events)

    def _take(self, delta: Delta) -> None:
        self._last = delta

    def _told(self, what: str, item: OutputItem, text: str) -> bytes:
        """The events for an item that has `begun`, `grown` by the text, or `ended`."""
        raise NotImplementedError

    def _filled(self) -> bytes:
        """The events for an answer without a word, which is an empty text."""
        if self._items:
            return b""
        self._items.append(OutputItem("text", 0))
        return self._told("begun", self._items[0], "")


def event(kind: str, **fields: Any) -> bytes:
    """An event of a stream that names its events."""
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


# Log-probabilities, in the formats of OpenAI and vLLM.


@record
class LogprobWriter:
    """Formats the log-probabilities of one answer.

    names_token_ids: tokens are named `token_id:N`, which no two of them share."""

    tokenizer: Tokenizer
    names_token_ids: bool = False

    def entries(
        self, token_ids: Sequence[int], logprobs: PromptLogprobs
    ) -> list[JsonObject | None]:
        """vLLM's: None for the first token, then by token id the prompt's own and the others."""

        def entry(token: int, value: float, rank: int) -> JsonObject:
            return {"logprob": value, "rank": rank, "decoded_token": self._text(token)}

        return [
            None
            if one is None
            else {
                str(token): entry(token, one.logprob, one.rank),
                **{
                    str(other): entry(other, value, rank)
                    for rank, (other, value) in enumerate(one.top, 1)
                    if other != token
                },
            }
            for token, one in zip(token_ids, logprobs, strict=True)
        ]

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> JsonObject:
        """Of the next tokens of a chat's output."""
        content = [
            {
                **self._alternative(token, one.logprob),
                "top_logprobs": [self._alternative(*other) for other in one.top],
            }
            for token, one in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def completion(
        self, token_ids: Sequence[int], logprobs: PromptLogprobs, offsets: list[int]
    ) -> JsonObject:
        """Of the next tokens of a completion, or of its echo: nothing is said of the first token of
        a prompt, which nothing comes before.  offsets: of each in the text."""
        return {
            "tokens": list(map(self._name, token_ids)),
            "token_logprobs": [one and one.logprob for one in logprobs],
            # As in vLLM, the token that was drawn is always there, though it may not be among the
            # most likely ones; where two tokens have the same text its value is the one shown.
            "top_logprobs": [
                one
                and {self._name(other): value for other, value in one.top}
                | {self._name(token): one.logprob}
                for token, one in zip(token_ids, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """The token's text; incomplete characters as OpenAI writes them."""
        if self.names_token_ids:
            return f"token_id:{token}"
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self.names_token_ids else self.tokenizer.token_text(token)

    def _alternative(self, token: int, value: float) -> JsonObject:
        return {
            "token": self._text(token),
            "logprob": value,
            "bytes": list(self.tokenizer.token_bytes(token)),
        }


# The cost of an answer.

STATISTICS_PATH = "metrics.speculative_decoding"
_TABLES = yaml.safe_load(Path(__file__).with_name("usage.yaml").read_text("utf-8"))
TIMES: Mapping[str, str] = _TABLES["times"]
_ABSENT = "prediction_idle_because"  # where it has no reason
# The words that a statistic may be, and what they mean.
WORDS: Mapping[str, Mapping[str, str]] = {"idle_because": MEANINGS, _ABSENT: _TABLES[_ABSENT]}


STATISTICS = tuple(
    Rule(name, note, schema, name != _ABSENT)
    for name, (schema, note) in _TABLES["statistics"].items()
)


def statistics_schema() -> JsonObject:
    """JSON Schema of `STATISTICS_PATH`."""
    properties = {}
    for rule in STATISTICS:
        schema, words = dict(rule.schema), WORDS.get(rule.name, {})
        if words:
            schema["enum"] = [*words, *([None] if rule.is_required else [])]
        said = ". ".join([rule.note, *(f"{word}: {words[word]}" for word in words)])
        properties[rule.name] = {**schema, "description": said}
    required = [rule.name for rule in STATISTICS if rule.is_required]
    return {"type": "object", "required": required, "properties": properties}


def times(generation: Generation) -> dict[str, float | None]:
    """Return the values of TIMES; null where one answer has several choices, as in vLLM."""
    if len(generation.choices) != 1:
        return dict.fromkeys(TIMES)
    (choice,) = generation.choices
    prefill_s, decode_s = choice.prefill_time_s, choice.stats.decode_time_s
    num_tokens = generation.num_output_tokens
    e2e_s = time.monotonic() - generation.arrived_at
    return {
        "queue_time_ms": 1000.0 * choice.queue_time_s,
        "time_to_first_token_ms": 1000.0 * prefill_s,
        "generation_time_ms": 1000.0 * decode_s,
        "mean_itl_ms": 1000.0 * decode_s / (num_tokens - 1) if num_tokens > 1 else None,
        "tokens_per_second": num_tokens / (prefill_s + decode_s) if prefill_s + decode_s else None,
        "e2e_time_ms": 1000.0 * e2e_s,
        "arrival_time": time.time() - e2e_s,
    }


def times_schema() -> JsonObject:
    """JSON Schema of the properties that TIMES names."""
    return {name: {"type": ["number", "null"], "description": text} for name, text in TIMES.items()}


def usage(generation: Generation) -> JsonObject:
    """OpenAI's usage.

    Its prediction tokens are drafts from the request's `prediction` alone; other drafters' counts
    are in the metrics.
    """
    prompt, output = generation.num_prompt_tokens, generation.num_output_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        "completion_tokens_details": {
            **generation.spec.prediction_counts(generation.stats),
            "reasoning_tokens": 0,
            "audio_tokens": 0,
        },
    }


def metrics(generation: Generation) -> JsonObject:
    """What TIMES and STATISTICS say, for the top level of every answer."""
    stats = generation.stats
    values = {rule.name: getattr(stats, rule.name) for rule in STATISTICS if rule.is_required}
    values["acceptance_histogram"] = values["acceptance_histogram"] or [0]
    values["idle_because"] = values["idle_because"] or None
    values |= generation.spec.prediction_idle()
    return {**times(generation), "speculative_decoding": values}
