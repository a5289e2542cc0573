"""Answers in pieces: what models write around tool calls, and what each API makes of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import yaml

from cluster.config.schema import CoordinatorConfig
from cluster.core import FinishReason, Request, SamplingParams, TokenEvent, token_array
from cluster.records import frozen
from cluster.text.answer import AnswerReader
from cluster.text.dialect import FORMATS, Dialect, ReasoningMarkers
from cluster.text.prompt import ChatUse, Prompt
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls.base import Part
from deployments.ingress.api.messages import AnthropicMessages, MessagesWriter
from deployments.ingress.api.response_request import Response
from deployments.ingress.api.response_writer import ResponseWriter
from deployments.ingress.choice import Choice, Delta
from deployments.ingress.coordinators import Coordinators
from deployments.ingress.generation import Generation
from deployments.ingress.openai_response import delta_fields, finish_reason, whole_message
from deployments.ingress.spec import Limits
from tests.deployments.test_openai_request import LIMITS, PLAIN, chat
from tests.support.text.tokenizers_for_tests import small_tokenizer


def parts_of(name: str, *pieces: str) -> list[Part]:
    """What the reader of a format of tool calls finds in a text that comes in these pieces."""
    reader = AnswerReader(FORMATS[name].read, ChatUse(reads_calls=True))
    return [*(part for piece in pieces for part in reader.push(piece)), *reader.finish()]


MARKERS = ReasoningMarkers("<think>", "</think>", (7,), (8,))
# Prompts that say nothing of the reasoning, begin it, and end it.
PROMPTS = ((1,), (7,), (7, 8))


def deepseek(text: str) -> str:
    """Its markers, written in ASCII."""
    return text.replace("|", "\uff5c").replace("_", "\u2581")


TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
ARGUMENTS = TEXTS["arguments"]
WRITTEN = TEXTS["written"]


def texts_of(name: str) -> Sequence[str]:
    """Texts of which the answers of a model with this format are put together."""
    return (WRITTEN[name], *TEXTS["markers"][name], *TEXTS["anywhere"])


@frozen
class Asked:
    """How an answer is read.  prompt_ids: of PROMPTS."""

    use: ChatUse | None
    dialect: Dialect
    prompt_ids: tuple[int, ...] = (1,)
    stop: tuple[str, ...] = ()
    end: FinishReason = FinishReason.STOP


def asked(name: str, *, is_reasoning: bool = False, **more: Any) -> Asked:
    is_harmony = name == "harmony"
    dialect = Dialect(FORMATS[name], MARKERS if is_reasoning else None, is_harmony=is_harmony)
    return Asked(**{"use": ChatUse(reads_calls=True), "dialect": dialect, **more})


def read_answer(tokenizer: Tokenizer, asked: Asked, events: Sequence[Sequence[int]]) -> list[Delta]:
    """The deltas of an answer whose tokens come in these events."""
    prompt_ids = token_array(asked.prompt_ids)
    request = Request("a", prompt_ids, SamplingParams())
    prompts = (Prompt(use=asked.use),)
    spec = replace(PLAIN, prompts=prompts, stop=asked.stop, skip_special_tokens=False)
    choice = Choice(0, request, spec, tokenizer, asked.dialect)
    deltas: list[Delta] = []
    for place, token_ids in enumerate(events):
        reason = asked.end if place + 1 == len(events) else None
        deltas += choice.feed(TokenEvent("a", 0, token_array(token_ids), finish_reason=reason))
    return deltas


def read_text(asked: Asked, text: str) -> list[Delta]:
    """The deltas of an answer that comes token by token."""
    tokenizer = small_tokenizer()
    tokens = tokenizer.encode(text, add_special_tokens=False).tolist()
    return read_answer(tokenizer, asked, [[token] for token in tokens])


def response_writer(limits: Limits = LIMITS, **more: Any) -> ResponseWriter:
    """What writes an answer of /v1/responses.  more: of its body."""
    request = Response.parse({"model": "demo", "input": "x", **more}, limits)
    made = Generation(
        "resp_1", request.spec, small_tokenizer(), Coordinators(CoordinatorConfig()), 8.0
    )
    return ResponseWriter(request, made, "id")


@frozen
class Apis:
    """What the three APIs make of an answer, whole and streamed, without what is random in it."""

    tokenizer: Tokenizer = field(default_factory=small_tokenizer)

    def whole(self, deltas: Sequence[Delta]) -> list[Any]:
        message = whole_message(deltas)
        calls = [call["function"] for call in message.get("tool_calls", ())]
        response = json.loads(response_writer().whole(deltas))
        answer = json.loads(self._messages().whole(deltas))
        return [
            (message["content"] or "", message.get("reasoning_content", ""), calls),
            finish_reason(deltas[-1]),
            _items(response),
            _blocks(answer["content"]),
            answer["stop_reason"],
        ]

    def streamed(self, deltas: Sequence[Delta]) -> list[Any]:
        chunks = [delta_fields(delta) for delta in deltas]
        calls: list[dict[str, str]] = []
        for piece in (piece for chunk in chunks for piece in chunk.get("tool_calls", ())):
            if "name" in piece["function"]:
                calls.append({"name": piece["function"]["name"], "arguments": ""})
            calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
        said = ["".join(c.get(key, "") for c in chunks) for key in ("content", "reasoning_content")]
        response = streamed(response_writer(), deltas)
        answer = streamed(self._messages(), deltas)
        return [
            (*said, calls),
            finish_reason(deltas[-1]),
            _streamed_items(response),
            _blocks(_streamed_blocks(answer)),
            next(e["delta"]["stop_reason"] for e in answer if e["type"] == "message_delta"),
        ]

    def _messages(self) -> MessagesWriter:
        request = AnthropicMessages.parse(chat(max_tokens=1), LIMITS)
        made = Generation(
            "msg_1", request.spec, self.tokenizer, Coordinators(CoordinatorConfig()), 8.0
        )
        return MessagesWriter(request, made, "id")


def streamed(writer: Any, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    """The events of a whole stream."""
    chunks = (writer.chunks([delta]) for delta in deltas)
    stream = b"".join([writer.opening(), *chunks, writer.closing()])
    lines = stream.decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data")]


def _items(response: Mapping[str, Any]) -> tuple[Any, ...]:
    items = [
        (item["type"], item.get("name"), item.get("arguments") or item.get("content"))
        for item in response["output"]
    ]
    return items, [item["status"] for item in response["output"]], response["status"]


def _streamed_items(events: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """What a client puts together of the deltas, which the last event has to agree with."""
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    grown = {}
    for event in events:
        if event["type"].endswith(".delta"):
            grown[event["output_index"]] = grown.get(event["output_index"], "") + event["delta"]
    last = events[-1]["response"]
    for index, item in enumerate(last["output"]):
        whole = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert grown.get(index, "") == whole
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    assert events[-1]["type"] == f"response.{last['status']}"
    return _items(last)


def _blocks(blocks: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [
        (block["type"], block.get("name"), block.get(block["type"], block.get("input")))
        for block in blocks
    ]


def _streamed_blocks(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    inputs = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            ((kind, text),) = [pair for pair in event["delta"].items() if pair[0] != "type"]
            if kind == "partial_json":
                inputs[event["index"]] = inputs.get(event["index"], "") + text
            else:
                blocks[event["index"]][kind] += text
    for index, text in inputs.items():
        try:
            given = json.loads(text)
        except ValueError:
            given = {}
        blocks[index]["input"] = given if isinstance(given, dict) else {}
    return blocks
