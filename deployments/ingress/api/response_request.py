"""Parses the body of /v1/responses into the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import RequestError
from deployments.ingress.api.response_store import ResponseStore
from deployments.ingress.api.table import MAX_NAME_LEN, MAX_TOKENS
from deployments.ingress.api.table_responses import RESPONSES
from deployments.ingress.api.tool_fields import chat_names, response_fields
from deployments.ingress.chat import parse_messages
from deployments.ingress.fields import Fields, json_kind, shown
from deployments.ingress.names import Names, Turn, places_of
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
    answer repeats.  ignored: names of fields that had no effect.  owner: as of `Limits`."""

    spec: GenerationSpec
    model: str
    messages: tuple[Message, ...]
    asked: Mapping[str, Any]
    stream: bool
    is_stored: bool
    shows_logprobs: bool
    ignored: tuple[str, ...]
    owner: str = ""


def parse_response(
    values: Mapping[str, Any], limits: Limits, store: ResponseStore
) -> ResponseRequest:
    """Parse the body of POST /v1/responses."""
    opened = RESPONSES.open(values, limits.compatibility)
    fields = Fields(values)
    model = model_of(fields, limits)
    previous = fields.string("previous_response_id", "", MAX_NAME_LEN)
    earlier: tuple[Message, ...] = ()
    if previous:
        earlier = store.get(previous, limits.owner, "previous_response_id").messages
    turns = _turns(fields.get("input"))
    with Names({"messages": "input", **places_of(turns)}).told():
        messages = (*earlier, *parse_messages([turn.message for turn in turns]))
    instructions = fields.string("instructions", "", 2**31)
    system: tuple[Message, ...] = ()
    if instructions:
        system = ({"role": "system", "content": instructions},)
    top = fields.integer("top_logprobs", 0, 0, limits.max_logprobs) or 0
    include = fields.strings("include", 16) or ()
    for name in include:
        if name != _LOGPROBS:
            raise RequestError.at("include", f"{shown(name)} is not served; remove it")
    shows_logprobs = bool(top or include)
    max_tokens = fields.integer("max_output_tokens", None, 1, MAX_TOKENS)
    logprobs = top if shows_logprobs else None

    as_chat = Fields(response_fields(fields))
    before = [
        *(Turn(message, {"": "instructions"}) for message in system),
        *(Turn(message, {"": "previous_response_id"}) for message in earlier),
    ]
    names = Names(
        {
            "messages": "input", "prompt": "input", "max_tokens": "max_output_tokens",
            **places_of([*before, *turns]),
            **chat_names(fields, "text.format", "reasoning.effort", "parameters"),
        }
    )  # fmt: skip
    with names.told():
        use = read_chat_use(as_chat, limits.dialect)
        prompt = Prompt(
            messages=(*system, *messages),
            tools=use.tools,
            template=ChatOptions(arguments=use.template_arguments or {}),
            names=names,
        )
        spec = with_chat_use(read_spec(as_chat, limits, (prompt,), 1, max_tokens, logprobs), use)
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
        owner=limits.owner,
    )


def _turns(value: Any) -> list[Turn]:
    """The messages of a chat that say the same."""
    if isinstance(value, str):
        if not value:
            raise RequestError.at("input", "empty; send at least one character")
        return [Turn({"role": "user", "content": value}, {"": "input", ".content": "input"})]
    if not isinstance(value, list):
        raise RequestError.at("input", f"{json_kind(value)}; send a string or a list")
    # Reasoning that comes back is no part of a prompt.
    return _joined_calls(
        [
            _turn(item, f"input[{i}]")
            for i, item in enumerate(value)
            if not (isinstance(item, dict) and item.get("type") == "reasoning")
        ]
    )


def _joined_calls(turns: list[Turn]) -> list[Turn]:
    """Calls that follow each other, or a text of the model's, are of one message."""
    found: list[Turn] = []
    for turn in turns:
        last = found[-1].message if found else None
        is_call = isinstance(turn.message, dict) and "tool_calls" in turn.message
        if is_call and isinstance(last, dict) and last.get("role") == "assistant":
            calls = last.get("tool_calls", [])
            places = _call_places(turn.places[""], len(calls))
            found[-1] = Turn(
                {**last, "tool_calls": [*calls, *turn.message["tool_calls"]]},
                {**found[-1].places, **places},
            )
        else:
            found.append(turn)
    return found


def _turn(item: Any, path: str) -> Turn:
    """The message of a chat that says the same as an item of the input."""
    if not isinstance(item, dict):
        return Turn(item, {"": path})  # `parse_messages` says what is wrong
    kind = "message" if item.get("type") is None else item["type"]
    if kind == "message":
        message = {"role": item.get("role"), "content": _content(item.get("content"))}
        return Turn(message, {"": path})
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return Turn(message, {"": path, **_call_places(path, 0)})
    if kind == "function_call_output":
        output = _content(item.get("output"))
        message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        places = {".content": f"{path}.output", ".tool_call_id": f"{path}.call_id"}
        return Turn(message, {"": path, **places})
    raise RequestError.at(
        f"{path}.type",
        f"{shown(kind)} is not served; send messages, function_call and function_call_output",
    )


def _call_places(path: str, number: int) -> dict[str, str]:
    return {f".tool_calls[{number}]": path, f".tool_calls[{number}].function": path}


def _content(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS
        else part
        for part in value
    ]
