"""Parses the body of /v1/responses into the messages of a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import RequestError
from deployments.ingress.api.response_store import ResponseStore
from deployments.ingress.api.table import MAX_NAME_LEN, MAX_TOKENS
from deployments.ingress.api.table_responses import RESPONSES
from deployments.ingress.api.tool_fields import OF_RESPONSES, response_fields, told_by
from deployments.ingress.chat import parse_messages
from deployments.ingress.fields import Fields, json_kind, shown
from deployments.ingress.openai_request import model_of, with_chat_use
from deployments.ingress.sampling import read_spec
from deployments.ingress.spec import ChatOptions, GenerationSpec, Limits, Message, Prompt
from deployments.ingress.tools import read_chat_use

_LOGPROBS = "message.output_text.logprobs"
# Every kind of text part that OpenAI's types name.
_TEXT_PARTS = ("input_text", "output_text", "text")


@dataclass(frozen=True, slots=True, eq=False)
class ResponseRequest:
    """messages: the conversation before the answer, without instructions.  asked: values that the
    answer repeats.  ignored: names of fields that had no effect."""

    spec: GenerationSpec
    model: str
    messages: tuple[Message, ...]
    asked: Mapping[str, Any]
    stream: bool
    is_stored: bool
    shows_logprobs: bool
    ignored: tuple[str, ...]


def parse_response(
    values: Mapping[str, Any], limits: Limits, store: ResponseStore
) -> ResponseRequest:
    """Parse the body of POST /v1/responses."""
    opened = RESPONSES.open(values, limits.compatibility)
    fields = Fields(values)
    model = model_of(fields, limits)
    previous = fields.string("previous_response_id", "", MAX_NAME_LEN)
    earlier = store.get(previous, "previous_response_id").messages if previous else ()
    # What is wrong is told by its place in `input`, also in what turns into messages.
    messages = (*earlier, *_told_of_input(lambda: _messages(fields.get("input"))))
    instructions = fields.string("instructions", "", 2**31)
    system: tuple[Message, ...] = ()
    if instructions:
        system = ({"role": "system", "content": instructions},)
    top = fields.integer("top_logprobs", 0, 0, limits.max_logprobs) or 0
    include = fields.strings("include", 16) or ()
    for name in include:
        if name != _LOGPROBS:
            raise RequestError(f"include: {shown(name)} is not served; remove it", param="include")
    shows_logprobs = bool(top or include)
    max_tokens = fields.integer("max_output_tokens", None, 1, MAX_TOKENS)
    logprobs = top if shows_logprobs else None

    def read() -> GenerationSpec:
        as_chat = Fields(response_fields(fields))
        use = read_chat_use(as_chat, limits.dialect)
        prompt = Prompt(
            messages=(*system, *messages),
            tools=use.tools,
            template=ChatOptions(arguments=use.template_arguments or {}),
        )
        return with_chat_use(read_spec(as_chat, limits, (prompt,), 1, max_tokens, logprobs), use)

    # Who sends vLLM's name of it is told by that one.
    is_own = fields.get("response_format") is not None
    names = tuple(name for name in OF_RESPONSES if not (is_own and "response_format" in name[0]))
    spec = told_by(names, read)
    return ResponseRequest(
        spec=spec,
        model=model,
        messages=messages,
        asked={
            "instructions": instructions or None,
            "previous_response_id": previous or None,
            "max_output_tokens": max_tokens,
            "metadata": fields.get("metadata") or {},
            "user": fields.get("user"),
            "temperature": spec.params.temperature,
            "top_p": spec.params.top_p,
            "top_logprobs": top,
            "tools": fields.get("tools") or [],
            "tool_choice": fields.get("tool_choice") or "auto",
            "parallel_tool_calls": fields.boolean("parallel_tool_calls", default=True),
            "text": fields.get("text") or {"format": {"type": "text"}},
            "reasoning": fields.get("reasoning") or {"effort": None, "summary": None},
        },
        stream=fields.boolean("stream", default=False),
        is_stored=fields.boolean("store", default=True),
        shows_logprobs=shows_logprobs,
        ignored=tuple(opened.ignored),
    )


def _told_of_input(parse: Callable[[], tuple[Message, ...]]) -> tuple[Message, ...]:
    try:
        return parse()
    except RequestError as error:
        name = (error.param or "").replace("messages", "input")
        raise RequestError(error.message.replace("messages", "input"), param=name) from None


def _messages(value: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        if not value:
            raise RequestError("input: empty; send at least one character", param="input")
        return parse_messages([{"role": "user", "content": value}])
    if not isinstance(value, list):
        raise RequestError(f"input: {json_kind(value)}; send a string or a list", param="input")
    # Reasoning that comes back is no part of a prompt.
    told = [
        _chat_message(item, f"input[{i}]")
        for i, item in enumerate(value)
        if not (isinstance(item, dict) and item.get("type") == "reasoning")
    ]
    return parse_messages(_joined_calls(told))


def _joined_calls(messages: list[Any]) -> list[Any]:
    """Calls that follow each other, or a text of the model's, are of one message."""
    found: list[Any] = []
    for message in messages:
        last = found[-1] if found else None
        is_call = isinstance(message, dict) and "tool_calls" in message
        if is_call and isinstance(last, dict) and last.get("role") == "assistant":
            calls = [*last.get("tool_calls", ()), *message["tool_calls"]]
            found[-1] = {**last, "tool_calls": calls}
        else:
            found.append(message)
    return found


def _chat_message(item: Any, path: str) -> Any:
    """The message of a chat that says the same as an item of the input."""
    if not isinstance(item, dict):
        return item  # `parse_messages` says what is wrong
    kind = item.get("type") or "message"
    if kind == "message":
        return {"role": item.get("role"), "content": _content(item.get("content"))}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": item.get("call_id"),
            "content": _content(item.get("output")),
        }
    raise RequestError(
        f"{path}.type: {shown(kind)} is not served; send messages, function_call and "
        "function_call_output",
        param=f"{path}.type",
    )


def _content(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS
        else part
        for part in value
    ]
