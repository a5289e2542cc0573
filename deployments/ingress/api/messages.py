"""/v1/messages: Anthropic's bodies, and errors in Anthropic's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from cluster.errors import ContextLengthError, DrafthouseError, RequestError
from cluster.records import frozen
from cluster.text.chat import part_text, text_of
from deployments.ingress import sampling
from deployments.ingress.api.contract import REQUIRED, Body, PostEndpoint, instead, supported
from deployments.ingress.chat import (
    MAX_MESSAGES,
    OF_MESSAGES,
    AnsweredConversation,
    TextOrParts,
    check_call,
)
from deployments.ingress.spec import Limits, Message
from deployments.ingress.structured import FlatFormat, Held
from deployments.ingress.tools import (
    MAX_TOOLS,
    OF_EFFORT,
    OF_TOOLS,
    CallChoice,
    Effort,
    Function,
    ToolUse,
)
from deployments.ingress.wording import KINDS_ELSEWHERE, TEXT_OR_OBJECTS, json_kind

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


@frozen
class MessageBlocks:
    """What the blocks of a message say: texts, calls of tools, and results by their places."""

    texts: list[str] = field(default_factory=list)
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    results: dict[str, Message] = field(default_factory=dict)


def _said(content: Any, limits: Limits) -> MessageBlocks:
    if isinstance(content, str):
        return MessageBlocks([content])
    if not isinstance(content, list):
        raise RequestError.at("", f"{json_kind(content)}; send a string or a list of blocks")
    said = MessageBlocks()
    for place, block in ((f"[{index}]", block) for index, block in enumerate(content)):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            said.calls.append(_call(block, place))
        elif kind == "tool_result":
            said.results[place] = _result(block, place)
        elif kind in _NO_PART or (limits.is_lenient and kind in KINDS_ELSEWHERE["blocks"]):
            continue
        else:
            said.texts.append(_text_of_block(block, place))
    return said


def _text_of_block(block: Any, place: str) -> str:
    """What a block says in words; raises RequestError for one that says nothing in words."""
    kind = block.get("type") if isinstance(block, dict) else None
    source = block.get("source") if kind == "document" else None
    if isinstance(source, dict) and source.get("type") == "text":
        block = {"type": "text", "text": source.get("data")}
    elif isinstance(source, dict) and source.get("type") == "content":
        return _text_of_blocks(source.get("content"), f"{place}.source.content")
    elif kind == "search_result":
        return _text_of_blocks(block.get("content"), f"{place}.content")
    elif kind == "tool_reference":
        block = {"type": "text", "text": block.get("tool_name")}
    return part_text(block, place)


def _text_of_blocks(content: Any, place: str) -> str:
    if not isinstance(content, list):
        return text_of(content, place)
    blocks = enumerate(content)
    return "\n".join(_text_of_block(block, f"{place}[{index}]") for index, block in blocks)


def _call(block: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    given = {} if block.get("input") is None else block["input"]
    if not isinstance(given, dict):
        raise RequestError.at(f"{place}.input", f"{json_kind(given)}; send an object")
    function = {"name": block.get("name"), "arguments": given}
    check_call(function, f"{place}.")
    return {"id": block.get("id"), "type": "function", "function": function}


def _result(block: Mapping[str, Any], place: str) -> Message:
    content, call = block.get("content"), block.get("tool_use_id")
    if not isinstance(call, str | None) or len(call or "") > 256:
        raise RequestError.at(f"{place}.tool_use_id", f"{json_kind(call)}; send the id of a call")
    own = {"tool_call_id": call} if call else {}
    text = "" if content is None else _text_of_blocks(content, f"{place}.content")
    return {"role": "tool", "content": text, **own}


class Turn(Body):
    is_listed = True
    role: Literal["user", "assistant", "system"] = supported(
        "user, assistant or system; a last assistant message is continued", REQUIRED
    )
    content: Annotated[MessageBlocks, instead(_said, TEXT_OR_OBJECTS)] = supported(
        "a text, or blocks: text, tool_use, tool_result", REQUIRED
    )

    def check(self, limits: Limits) -> None:
        if self.content.calls and self.role != "assistant":
            raise RequestError.at("content", "only an assistant calls tools; remove tool_use")

    def messages(self, place: str) -> list[tuple[str, Message]]:
        """As templates read it, each message with its place: results are messages of their own."""
        said = self.content
        found = [(f"{place}.content{below}", message) for below, message in said.results.items()]
        if said.texts or said.calls or not found:
            calls = {"tool_calls": said.calls} if said.calls else {}
            found.append((place, {"role": self.role, "content": "\n".join(said.texts), **calls}))
        return found


# fmt: off
class MessagesTool(Function):
    kinds = frozenset({"custom"})
    type: Literal["custom"] | None = supported("custom")
    parameters: dict[str, Any] | None = supported("a JSON schema", alias="input_schema")


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"] = supported("who chooses", REQUIRED)
    name: str | None = supported("of a tool")
    disable_parallel_tool_use: bool = supported("true = one call at most", False)


class Thinking(Body):
    type: Literal["enabled", "adaptive", "disabled"] = supported(
        "enabled, adaptive or disabled", REQUIRED)


class OutputConfig(Body):
    format: FlatFormat | None = supported("its type is json_schema")
    effort: Effort | None = supported(OF_EFFORT, max_length=16)


class Counted(ToolUse, sampling.Named):
    """What makes the prompt."""

    hidden = ToolUse.all_but("tools", "tool_choice")

    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)] = supported(
        OF_MESSAGES, REQUIRED)
    system: TextOrParts | None = supported("a text, or text blocks")
    tools: list[MessagesTool] = supported(OF_TOOLS, (), max_length=MAX_TOOLS)  # type: ignore[assignment]
    tool_choice: ToolChoice | None = supported(  # type: ignore[assignment]
        "its type is auto, any, tool or none; calls that are forced obey their schemas")
    thinking: Thinking | None = supported(
        "enabled or adaptive = the reasoning has blocks of its own")
    output_config: OutputConfig | None = supported("what the answer must be")
    output_format: FlatFormat | None = supported("the older name of output_config.format")
    # fmt: on

    def choice(self) -> CallChoice:
        asked = self.tool_choice
        if asked is None:
            return CallChoice()
        return CallChoice(_CHOICES[asked.type], asked.name, "name", asked.disable_parallel_tool_use)

    def effort(self) -> tuple[str, str | None]:
        return "output_config.effort", (self.output_config or OutputConfig()).effort

    def shows_reasoning(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    def ending(self, last: Message) -> tuple[bool, bool]:
        # An answer that the client has begun is continued.
        continues = last["role"] == "assistant" and "tool_calls" not in last
        return not continues, continues

    def said(self) -> list[tuple[str, Message]]:
        system = {"role": "system", "content": self.system}
        found: list[tuple[str, Message]] = [] if self.system is None else [("system", system)]
        for index, turn in enumerate(self.messages):
            found += turn.messages(f"messages[{index}]")
        return found


_SHARED = (
    "model", "temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "stream", "metadata",
    "cache_salt", "speculation",
)


# fmt: off
class AnthropicMessages(Counted, AnsweredConversation):
    hidden = Counted.hidden | sampling.Sampling.all_but(*_SHARED)

    max_tokens: sampling.PositiveCount = supported(sampling.OF_TOKENS, REQUIRED)
    stop: sampling.StopTexts = supported(sampling.OF_STOP, (), alias="stop_sequences")
    # fmt: on

    def form(self) -> Held | None:
        form, older = self.output_config and self.output_config.format, self.output_format
        if form:
            return form.held("output_config.format")
        return older.held("output_format") if older else None


def error_body(error: DrafthouseError, request_id: str) -> bytes:
    """`error` as Anthropic has it."""
    kind = _ERROR_TYPES.get(error.http_status, "api_error")
    # By the first words of the message clients know a full context.
    message = error.reason if isinstance(error, ContextLengthError) else error.message
    content = {"type": kind, "message": message}
    return json.dumps({"type": "error", "error": content, "request_id": request_id}).encode()


MESSAGES = PostEndpoint(
    "/v1/messages", "Answer a conversation, in the format of Anthropic's Messages",
    AnthropicMessages,
)
COUNT_TOKENS = PostEndpoint(
    "/v1/messages/count_tokens", "How many tokens a conversation has", Counted
)
