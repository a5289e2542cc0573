"""/v1/messages: Anthropic's bodies, and answers and errors in Anthropic's format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cluster.core import FinishReason
from cluster.errors import ContextLengthError, DrafthouseError, RequestError
from cluster.text.chat import part_text, text_of
from cluster.text.prompt import Message, PlacedMessages
from deployments.ingress import sampling
from deployments.ingress.api.contract import REQUIRED, Body, supported
from deployments.ingress.api.writer import ItemWriter, OutputItem, event, metrics
from deployments.ingress.choice import Delta
from deployments.ingress.nested import FlatFormat
from deployments.ingress.openai_request import (
    MAX_MESSAGES,
    OF_MESSAGES,
    AnsweredConversation,
    Parts,
    TextOrParts,
    Turn,
    call_of,
    checked_call,
)
from deployments.ingress.tools import (
    MAX_TOOLS,
    OF_EFFORT,
    OF_TOOLS,
    CallChoice,
    Effort,
    Function,
    ToolUse,
)
from deployments.ingress.wording import KINDS_ELSEWHERE, JsonObject, json_kind

_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NO_PART = ("thinking", "redacted_thinking")  # of a prompt
_CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


def _text_of_block(block: Any, place: str) -> str:
    """What a block says in words; raises RequestError for one that says nothing in words."""
    match block:
        case {"type": "document", "source": {"type": "text"} as source}:
            block = {"type": "text", "text": source.get("data")}
        case {"type": "document", "source": {"type": "content"} as source}:
            return _text_of_blocks(source.get("content"), f"{place}.source.content")
        case {"type": "search_result"}:
            return _text_of_blocks(block.get("content"), f"{place}.content")
        case {"type": "tool_reference"}:
            block = {"type": "text", "text": block.get("tool_name")}
    return part_text(block, place)


def _text_of_blocks(content: Any, place: str) -> str:
    if not isinstance(content, list):
        return text_of(content, place)
    blocks = enumerate(content)
    return "\n".join(_text_of_block(block, f"{place}[{index}]") for index, block in blocks)


def _call(block: JsonObject, place: str) -> JsonObject:
    given = {} if block.get("input") is None else block["input"]
    if not isinstance(given, dict):
        raise RequestError.at(f"{place}.input", f"{json_kind(given)}; send an object")
    return checked_call(call_of(block.get("id"), block.get("name"), given), f"{place}.")


def _result(block: JsonObject, place: str) -> Message:
    content, call = block.get("content"), block.get("tool_use_id")
    if not isinstance(call, str | None) or len(call or "") > 256:
        raise RequestError.at(f"{place}.tool_use_id", f"{json_kind(call)}; send the id of a call")
    own = {"tool_call_id": call} if call else {}
    text = "" if content is None else _text_of_blocks(content, f"{place}.content")
    return {"role": "tool", "content": text, **own}


class MessagesTurn(Turn):
    role: Literal["user", "assistant", "system"] = supported(
        "user, assistant or system; a last assistant message is continued", REQUIRED
    )
    content: Parts = supported("a text, or blocks: text, tool_use, tool_result", REQUIRED)

    def check(self) -> None:
        texts, calls, blocks = list[str](), list[JsonObject](), self.content
        if isinstance(blocks, str):
            blocks = [{"type": "text", "text": blocks}]
        if not isinstance(blocks, list):
            raise self.wrong("content", f"{json_kind(blocks)}; send a string or a list of blocks")
        for index, block in enumerate(blocks):
            kind = block.get("type") if isinstance(block, dict) else None
            place = f"content[{index}]"
            if kind == "tool_use":
                calls.append(_call(block, place))
            elif kind == "tool_result":
                # Results stand by themselves.
                self._messages.append((place, _result(block, place)))
            elif kind in _NO_PART or (
                self._limits.is_lenient and kind in KINDS_ELSEWHERE["blocks"]
            ):
                continue
            else:
                texts.append(_text_of_block(block, place))
        if calls and self.role != "assistant":
            raise self.wrong("content", "only an assistant calls tools; remove tool_use")
        if texts or calls or not self._messages:
            told = {"tool_calls": calls} if calls else {}
            own = {"role": self.role, "content": "\n".join(texts), **told}
            self._messages.append(("", own))


# fmt: off
class MessagesTool(Function):
    kinds = frozenset({"custom"})
    type: Literal["custom"] | None = supported("custom")
    parameters: JsonObject | None = supported("a JSON schema", alias="input_schema")


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"] = supported("who chooses", REQUIRED)
    name: str | None = supported("of a tool")
    disable_parallel_tool_use: bool = supported("true = one call at most", False)


class Thinking(Body):
    type: Literal["enabled", "adaptive", "disabled"] = supported(
        "enabled, adaptive or disabled", REQUIRED)


class OutputConfig(Body):
    format: FlatFormat | None = supported("its type is json_schema")
    effort: Effort | None = supported(OF_EFFORT)


class Counted(ToolUse, sampling.Named):
    """What makes the prompt."""

    path, summary = "/v1/messages/count_tokens", "How many tokens a conversation has"
    hidden = ToolUse.all_but("tools", "tool_choice")
    effort = "output_config.effort"

    messages: list[MessagesTurn] = supported(
        OF_MESSAGES, REQUIRED, min_length=1, max_length=MAX_MESSAGES)
    system: TextOrParts | None = supported("a text, or text blocks")
    tools: list[MessagesTool] = supported(OF_TOOLS, (), max_length=MAX_TOOLS)  # type: ignore[assignment]
    tool_choice: ToolChoice | None = supported(  # type: ignore[assignment]
        "its type is auto, any, tool or none; calls that are forced obey their schemas")
    thinking: Thinking | None = supported(
        "enabled or adaptive = the reasoning has blocks of its own")
    output_config: OutputConfig = supported("what the answer must be", OutputConfig())
    output_format: FlatFormat | None = supported("the older name of output_config.format")
    # fmt: on

    def choice(self) -> CallChoice:
        asked = self.tool_choice
        if asked is None:
            return CallChoice()
        return CallChoice(_CHOICES[asked.type], asked.name, "name", asked.disable_parallel_tool_use)

    def shows_reasoning(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    def ending(self, last: Message) -> tuple[bool, bool]:
        # An answer that the client has begun is continued.
        continues = last["role"] == "assistant" and "tool_calls" not in last
        return not continues, continues

    def said(self) -> PlacedMessages:
        system = {"role": "system", "content": self.system}
        found: PlacedMessages = [] if self.system is None else [("system", system)]
        return found + super().said()


# fmt: off
class AnthropicMessages(Counted, AnsweredConversation):
    path = "/v1/messages"
    summary = "Answer a conversation, in the format of Anthropic's Messages"
    hidden = Counted.hidden | sampling.Sampling.all_but(
        "model", "temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "stream",
        "metadata", "cache_salt", "speculation")
    forms = ("output_config.format", "output_format")

    max_tokens: sampling.PositiveCount = supported(sampling.OF_TOKENS, REQUIRED)
    stop: sampling.StopTexts = supported(sampling.OF_STOP, (), alias="stop_sequences")
    # fmt: on


def error_body(error: DrafthouseError, request_id: str) -> bytes:
    """`error` as Anthropic has it."""
    content = {
        "type": _ERROR_TYPES.get(error.http_status, "api_error"),
        # By the first words of the message clients know a full context.
        "message": error.reason if isinstance(error, ContextLengthError) else error.message,
    }
    return json.dumps({"type": "error", "error": content, "request_id": request_id}).encode()


# The block of each kind of item, its field that grows, and the delta that brings more of it.
_CALL = {"type": "tool_use"}, "partial_json", "input_json_delta"
_BLOCKS: dict[str, tuple[dict[str, str], str, str]] = {
    "text": ({"type": "text", "text": ""}, "text", "text_delta"),
    "reasoning": (
        {"type": "thinking", "thinking": "", "signature": ""},
        "thinking",
        "thinking_delta",
    ),
    "function": _CALL,
    "custom": _CALL,
}


class MessagesWriter(ItemWriter):
    """Writes one answer: whole, or as the events of a stream."""

    _request: AnthropicMessages

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        self.chunks(deltas)
        self._filled()
        body = self._message(list(map(_complete, self._items)))
        return json.dumps({**body, **self._end(), "metrics": metrics(self._generation)}).encode()

    def opening(self) -> bytes:
        return event("message_start", message=self._message([])) + event("ping")

    def closing(self) -> bytes:
        return (
            self._filled()
            + self._told("ended", self._items[-1], "")
            + event(
                "message_delta",
                delta=self._end(),
                usage=self._usage(),
                metrics=metrics(self._generation),
            )
            + event("message_stop")
        )

    def failing(self, error: DrafthouseError) -> bytes:
        return b"event: error\ndata: " + error_body(error, self._request_id) + b"\n\n"

    def _told(self, what: str, item: OutputItem, text: str) -> bytes:
        if what == "begun":
            return event("content_block_start", index=item.index, content_block=_block(item))
        if what == "ended":
            return event("content_block_stop", index=item.index)
        _, field, kind = _BLOCKS[item.kind]
        delta = {"type": kind, field: text}
        return event("content_block_delta", index=item.index, delta=delta) if text else b""

    def _end(self) -> JsonObject:
        last = self._last
        if last.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop}
        reason = "tool_use" if last.has_calls and not last.is_cut else "end_turn"
        if last.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        return {"stop_reason": reason, "stop_sequence": None}

    def _message(self, content: list[JsonObject]) -> JsonObject:
        return {
            "id": self._generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> JsonObject:
        num_cached = self._generation.num_cached_tokens
        return {
            # Anthropic's: without those that were in the cache.
            "input_tokens": self._generation.num_prompt_tokens - num_cached,
            "output_tokens": self._generation.num_output_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
        }


def _block(item: OutputItem) -> JsonObject:
    """A block that begins."""
    block = _BLOCKS[item.kind][0]
    call = {"id": f"toolu_{item.mark[:24]}", "name": item.name, "input": {}}
    return {**block, **call} if item.is_call else {**block}


def _complete(item: OutputItem) -> JsonObject:
    """A block of a whole answer."""
    block = _block(item)
    if not item.is_call:
        return {**block, block["type"]: item.text}
    try:
        given = json.loads(item.text or "{}")
        json.dumps(given, allow_nan=False)  # what is told must be JSON
    except (ValueError, RecursionError):  # the call is cut off, or its arguments are no JSON
        given = {}
    return {**block, "input": given if isinstance(given, dict) else {}}
