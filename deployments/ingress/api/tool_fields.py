"""Tools and structured output of /v1/responses and /v1/messages, told in the fields of a chat.

The chat's parsers read them; `chat_names` says what the body calls what they find wrong.
"""

from __future__ import annotations

from typing import Any

from cluster.errors import RequestError
from deployments.ingress.fields import Fields, shown


def chat_names(fields: Fields, form: str, effort: str, schema: str) -> dict[str, str]:
    """What the body calls what a chat has: its tools, its form and its reasoning.

    form, effort: the fields.  schema: of a tool.
    """
    found = {
        "tool_choice.function": "tool_choice", "reasoning_effort": effort,
        "response_format": form, "response_format.json_schema": form,
    }  # fmt: skip
    if fields.get("response_format") is not None:  # vLLM's name of it
        del found["response_format"], found["response_format.json_schema"]
    for index in range(len(fields.listed("tools") or ())):
        found[f"tools[{index}].function"] = f"tools[{index}]"
        found[f"tools[{index}].function.parameters"] = f"tools[{index}].{schema}"
    return found


def response_fields(fields: Fields) -> dict[str, Any]:
    """The chat's fields of a body of /v1/responses."""
    found = dict(fields.values())
    found["tools"] = _functions(fields, "parameters")
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind != "function":
            raise RequestError.at(
                "tool_choice.type",
                f"{shown(kind)} is not served; send function and a name, or "
                "tool_choice none, auto or required",
            )
        found["tool_choice"] = _named(choice.get("name"))
    answer, reasoning = fields.object("text"), fields.object("reasoning")
    form = None if answer is None else answer.object("format")
    if form is not None:
        if fields.get("response_format") is not None:
            raise RequestError.at(
                "text.format", "response_format says what the answer must be, too; send one"
            )
        found["response_format"] = _form(form)
    if reasoning is not None:
        found["reasoning_effort"] = reasoning.get("effort")
    return found


def messages_fields(fields: Fields) -> dict[str, Any]:
    """The chat's fields of a body of /v1/messages."""
    found = dict(fields.values())
    found["tools"] = _functions(fields, "input_schema")
    asked = fields.object("tool_choice")
    if asked is not None:
        asked.refuse_others("type", "name", "disable_parallel_tool_use")
        kinds = {"auto": "auto", "any": "required", "none": "none"}
        kind = asked.get("type")
        if kind == "tool":
            found["tool_choice"] = _named(asked.get("name"))
        elif isinstance(kind, str) and kind in kinds:
            found["tool_choice"] = kinds[kind]
        else:
            raise asked.wrong("type", f"{shown(kind)}; send auto, any, tool or none")
        is_single = asked.boolean("disable_parallel_tool_use", default=False)
        found["parallel_tool_calls"] = not is_single
    config = fields.object("output_config")
    if config is not None:
        found["reasoning_effort"] = config.get("effort")
        if (form := config.object("format")) is not None:
            # Anthropic's schemas have no names.
            found["response_format"] = _form(Fields({"name": "answer", **form.values()}))
    return found


def shows_thinking(fields: Fields) -> bool:
    """Whether an answer of /v1/messages has its reasoning in blocks of its own."""
    thinking = fields.object("thinking")
    if thinking is None:
        return False
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise thinking.wrong("type", f"{shown(kind)}; send enabled, adaptive or disabled")
    return bool(kind != "disabled")


def _functions(fields: Fields, schema: str) -> list[dict[str, Any]]:
    """The tools as the chat has them.  schema: what a tool calls that of its arguments."""
    tools = fields.listed("tools") or []
    return [_function(Fields.of(tool, f"tools[{i}]"), schema) for i, tool in enumerate(tools)]


def _function(fields: Fields, schema: str) -> dict[str, Any]:
    kind = fields.get("type")
    if kind not in (None, "function" if schema == "parameters" else "custom"):
        raise fields.wrong("type", f"{shown(kind)} is not served; send functions")
    fields.refuse_others("type", "name", "description", schema, "strict", "cache_control")
    theirs = {"name": "name", "description": "description", "parameters": schema,
              "strict": "strict"}  # fmt: skip
    function = {own: fields.get(key) for own, key in theirs.items() if fields.get(key) is not None}
    return {"type": "function", "function": function}


def _named(name: Any) -> dict[str, Any]:
    """A choice of one function as the chat has it."""
    return {"type": "function", "function": {"name": name}}


def _form(fields: Fields) -> dict[str, Any]:
    """`response_format` for a form whose schema stands beside its type."""
    kind = fields.get("type")
    if kind != "json_schema":
        # Of a type that is none, that is what is wrong, and not what stands beside it.
        is_known = kind in (None, "text", "json_object", "structural_tag")
        return dict(fields.values()) if is_known else {"type": kind}
    fields.refuse_others("type", "name", "description", "schema", "strict")
    schema = {key: value for key, value in fields.values().items() if key != "type"}
    return {"type": "json_schema", "json_schema": schema}
