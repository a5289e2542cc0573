"""The body of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cluster.errors import RequestError
from cluster.text.chat import text_of
from cluster.text.json_text import json_or_text
from cluster.text.prompt import Message, PlacedMessages
from deployments.ingress import sampling
from deployments.ingress.api.contract import REQUIRED, Body, or_text, supported
from deployments.ingress.nested import FlatFormat
from deployments.ingress.openai_request import (
    MAX_MESSAGES,
    AnsweredConversation,
    Harmless,
    Parts,
    Role,
    Turn,
    call_of,
    checked_call,
)
from deployments.ingress.spec import StoredResponse
from deployments.ingress.tools import (
    MAX_TOOLS,
    OF_EFFORT,
    OF_TOOLS,
    TEXT_ARGUMENT,
    Custom,
    Effort,
    Function,
)
from deployments.ingress.wording import KINDS_ELSEWHERE, TEXT, JsonObject, shown

_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_LOGPROBS = "message.output_text.logprobs"
# Every kind of text part that OpenAI's types name.
_TEXT_PARTS = ("input_text", "output_text", "text")


# fmt: off
class Item(Turn):
    """A message, a call, its output, or the reasoning of an earlier answer."""

    type: str = supported(
        "message, reasoning, function_call, custom_tool_call, local_shell_call, or one of those "
        "calls with _output behind it", "message")
    role: Role | None = supported("of a message: user, assistant, system or developer")
    content: Parts = supported("of a message")
    call_id: str | None = supported("of a call and of its output", max_length=256)
    name: str | None = supported("of the function that was called")
    arguments: str | JsonObject = supported("of a function_call, as JSON", "{}")
    input: str = supported("of a custom_tool_call", "")
    action: JsonObject = supported("of a local_shell_call", {})
    output: Parts = supported("of the call")
    # fmt: on

    def check(self) -> None:
        message: Message
        if self.type == "message":
            if not self.role:
                raise self.wrong("role", "missing; send user, assistant, system or developer")
            content = text_of(self.content, "content", _TEXT_PARTS)
            message = {"role": self.role, "content": content}
        elif self.type in _CALLS:
            name, arguments = self.name, self.arguments
            if self.type == "custom_tool_call":
                arguments = {TEXT_ARGUMENT: self.input}
            elif self.type == "local_shell_call":
                name, arguments = "local_shell", self.action
            elif isinstance(arguments, str):
                arguments = json_or_text(arguments or "{}", "arguments")
            call = checked_call(call_of(self.call_id, name, arguments), "")
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        elif self.type.removesuffix("_output") in _CALLS:
            call_id = {"tool_call_id": self.call_id} if self.call_id else {}
            content = text_of(self.output, "output", _TEXT_PARTS)
            message = {"role": "tool", "content": content, **call_id}
        elif self.type == "reasoning":
            return  # what comes back of it is no part of a prompt
        else:
            raise self.wrong(
                "type",
                f"{shown(self.type)} is not served; send messages, function_call and "
                "function_call_output",
            )
        self._messages.append(("", message))

    @classmethod
    def leaves_out(cls, values: JsonObject) -> bool:
        return values.get("type") in KINDS_ELSEWHERE["items"]


# fmt: off
class ResponseTool(Custom):
    hidden = frozenset()
    kinds = frozenset({"function", "custom"})
    type: Literal["function", "custom"] | None = supported("function or custom")

    def named(self) -> Function:
        return super().named() if self.type == "custom" else self


class Reasoning(Body):
    effort: Effort | None = supported(OF_EFFORT)


class TextOptions(Body):
    format: FlatFormat | None = supported("its type is text, json_object or json_schema")


class Response(AnsweredConversation, Harmless):
    path = "/v1/responses"
    summary = "Answer a conversation, in the format of OpenAI's Responses"
    conversation, effort = "input", "reasoning.effort"
    forms = ("text.format", "response_format")
    hidden = frozenset(
        {"n", "return_token_ids", "return_draft_sources", "return_draft_trees", "prompt_logprobs",
         "add_special_tokens", "return_tokens_as_token_ids", "early_stopping", "functions",
         "function_call", "chat_template_kwargs", "reasoning_effort", "include_reasoning",
         "thinking_token_budget"})

    input: Annotated[
        list[Item], Field(min_length=1, max_length=MAX_MESSAGES),
        or_text({**TEXT, "minLength": 1}, lambda text: [{"role": "user", "content": text}]),
    ] = supported("a text, or messages, function calls and their outputs", REQUIRED)
    instructions: str = supported("a system message before all others", "")
    max_tokens: sampling.PositiveCount | None = supported(
        sampling.OF_TOKENS, alias="max_output_tokens")
    previous_response_id: str | None = supported(
        "the conversation goes on after this answer, if it is still kept "
        "(api.max_stored_responses)", min_length=1, max_length=sampling.MAX_NAME_LEN)
    store: bool = supported("false = the answer is not kept for previous_response_id", True)
    include: list[str] = supported(
        f"{_LOGPROBS}: with top_logprobs alternatives", (), max_length=16)
    top_logprobs: sampling.Alternatives = supported("alternatives per token", 0)
    reasoning: Reasoning = supported("how the model reasons", Reasoning())
    text: TextOptions = supported("what the answer must be", TextOptions())
    tools: list[ResponseTool] = supported(OF_TOOLS, (), max_length=MAX_TOOLS)  # type: ignore[assignment]
    # fmt: on
    # The conversation that it goes on with.
    _earlier: tuple[Message, ...] = ()

    def check(self) -> None:
        super().check()
        for kind in self.include:
            if kind != _LOGPROBS:
                self.ignore("include", f"{shown(kind)}; send {_LOGPROBS}")
        if self.text.format and self.response_format:
            raise RequestError.at(
                "text.format", "response_format says what the answer must be, too; send one"
            )
        limits, earlier = self._limits, self.previous_response_id
        if earlier:
            found = limits.store.get(earlier, limits.caller.name, "previous_response_id")
            self._earlier = found.messages

    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.top_logprobs or _LOGPROBS in self.include else None

    def said(self) -> PlacedMessages:
        own: PlacedMessages = []
        for where, message in super().said():
            place, last = own[-1] if own else ("", {})
            # Calls that follow each other, or the model's text, are of one message.
            if "tool_calls" in message and last.get("role") == "assistant":
                calls = [*last.get("tool_calls", ()), *message["tool_calls"]]
                own[-1] = place, {**last, "tool_calls": calls}
            else:
                own.append((where, message))
        told: Message = {"role": "system", "content": self.instructions}
        return [
            *([("instructions", told)] if self.instructions else []),
            *(("previous_response_id", message) for message in self._earlier),
            *own,
        ]

    def keep(self, body: JsonObject, message: Message) -> None:
        """Keep its answer, if that is wanted.  message: what it says, for who goes on with it."""
        if self.store:
            said = [told for place, told in self.said() if place != "instructions"]
            self._limits.store.put(
                StoredResponse(body, (*said, message), self._limits.caller.name)
            )

    def repeated(self) -> JsonObject:
        """Values that the answer repeats, as they were sent."""
        sent, params = self._given, self.spec.params
        return {
            "instructions": self.instructions or None,
            "previous_response_id": self.previous_response_id,
            "max_output_tokens": self.max_tokens,
            "metadata": self.metadata,
            "user": self.user,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": self.top_logprobs,
            "tools": sent.get("tools") or [],
            "tool_choice": sent.get("tool_choice") or "auto",
            "parallel_tool_calls": self.parallel_tool_calls,
            "text": sent.get("text") or {"format": {"type": "text"}},
            "reasoning": sent.get("reasoning") or {"effort": None, "summary": None},
        }
