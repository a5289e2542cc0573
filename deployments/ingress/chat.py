"""What a request says of a conversation: its messages, and how they become a prompt.

`cluster.text.chat` renders them for the model, in the same way for HTTP and gRPC.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from cluster.errors import RequestError
from cluster.text.chat import text_of, tool_calls_of
from deployments.ingress.api.contract import REQUIRED, Body, Read, instead, supported
from deployments.ingress.sampling import Sampling
from deployments.ingress.spec import GenerationSpec, Limits, Message, PlacedMessages
from deployments.ingress.tools import TEXT_ARGUMENT, ToolUse
from deployments.ingress.wording import TEXT_OR_OBJECTS, JsonObject, json_kind

MAX_MESSAGES = 4096
_MAX_ID_LEN = 256
_Anything = Annotated[Any, WithJsonSchema({"type": "object"})]


# Of kinds that differ from one API to the other.
Parts = Annotated[Any, WithJsonSchema(TEXT_OR_OBJECTS)]
TextOrParts = Annotated[str, instead(lambda value, _: text_of(value, ""), TEXT_OR_OBJECTS)]


def _role(role: str, limits: Any) -> str:
    if role == "function":
        raise RequestError(
            "'function': the older form of tool; send system, user, assistant or tool"
        )
    return role


Role = Annotated[str, Field(max_length=64), Read(_role)]


# fmt: off
class ChatTurn(Body):
    """OpenAI's message."""

    is_listed = True

    role: Role = supported(
        "system, developer, user, assistant or tool, and what else the model's template names",
        REQUIRED, min_length=1)
    content: TextOrParts | None = supported(
        "a text, or text parts; only a message with tool_calls has none")
    name: str | None = supported("for templates that use it", max_length=_MAX_ID_LEN)
    tool_calls: list[_Anything] | None = supported("of an earlier answer", max_length=128)
    tool_call_id: str | None = supported("of a message of role tool", max_length=_MAX_ID_LEN)
    reasoning_content: str | None = supported(
        "the reasoning of an earlier answer, for templates that use it")
    reasoning: str | None = supported("another name of reasoning_content")
    # fmt: on

    def check(self, limits: Any) -> None:
        if self.tool_calls and self.role != "assistant":
            raise self.wrong("tool_calls", "only messages of role assistant have some; remove them")
        # An answer may have been reasoning alone.
        may_be_empty = self.role == "assistant" and limits.is_lenient
        if self.content is None and not self.tool_calls and not may_be_empty:
            raise self.wrong("content", "missing; send a string or a list of text parts")
        self.tool_calls = read_calls(self.tool_calls or [], "tool_calls")

    def message(self) -> Message:
        """As templates read it; they ask for the content's length."""
        self.reasoning_content = self.reasoning_content or self.reasoning
        names = ("tool_calls", "name", "tool_call_id", "reasoning_content")
        others = {name: getattr(self, name) for name in names if getattr(self, name)}
        return {"role": self.role, "content": self.content or "", **others}


def read_calls(calls: list[Any], path: str) -> list[JsonObject]:
    """Calls of an earlier answer as templates read them: their arguments are objects."""
    found = tool_calls_of(list(map(_as_function, calls)), path)
    for index, call in enumerate(found):
        check_call(call["function"], f"{path}[{index}].function.")
    return found


def _as_function(call: Any) -> Any:
    """A call of a custom tool as that of the function which models know it as."""
    custom = call.get("custom") if isinstance(call, dict) else None
    if not isinstance(custom, dict):
        return call
    arguments = {TEXT_ARGUMENT: custom.get("input")}
    function = {"name": custom.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def check_call(function: JsonObject, path: str) -> None:
    """Raise RequestError for what cannot be called; path: what stands before its fields' names."""
    name, arguments = function.get("name"), function["arguments"]
    if not isinstance(name, str) or not 0 < len(name) <= 64:
        what = json_kind(name) if name else "missing"
        raise RequestError.at(f"{path}name", f"{what}; send the tool's name")
    if not isinstance(arguments, str | dict):
        raise RequestError.at(
            f"{path}arguments", f"{json_kind(arguments)}; send a JSON object as a text"
        )


OF_MESSAGES = "the conversation"
Turns = Annotated[list[ChatTurn], Field(min_length=1, max_length=MAX_MESSAGES)]


class Harmless(Body):
    """OpenAI's: they affect billing, caching or safety there, never the text."""



class AnsweredConversation(ToolUse, Sampling):
    """A conversation that is answered."""

    def asked(self, limits: Limits) -> GenerationSpec:
        prompt, use = self.prompt_of(limits, self.form())
        return self.generation(limits, (prompt,), self.num_logprobs(), use=use)


class Conversation(ToolUse):
    """Messages, and what the model's chat template is told beside them."""

    messages: Turns = supported(OF_MESSAGES, REQUIRED)
    add_generation_prompt: bool | None = supported("false = the answer's header is not added")
    continue_final_message: bool = supported("the answer goes on with the last message", False)

    def check(self, limits: Any) -> None:
        super().check(limits)
        if self.continue_final_message and self.add_generation_prompt:
            raise self.wrong(
                "continue_final_message",
                "not together with add_generation_prompt; send one of them",
            )

    def ending(self, last: Message) -> tuple[bool, bool]:
        adds, continues = self.add_generation_prompt, self.continue_final_message
        return not continues if adds is None else adds, continues

    def said(self) -> PlacedMessages:
        return [(f"messages[{at}]", turn.message()) for at, turn in enumerate(self.messages)]
