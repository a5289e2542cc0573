"""Tools and structured output of /v1/responses and /v1/messages, told in the fields of a chat.

The chat's parsers read them; `chat_names` says what the body calls what they find wrong.
"""

from __future__ import annotations

from typing import Any

from cluster.errors import RequestError
from deployments.ingress.fields import Fields, json_kind, shown
from deployments.ingress.structured import refuse_others


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
    for index in range(len(_listed(fields, "tools"))):
        found[f"tools[{index}].function"] = f"tools[{index}]"
        found[f"tools[{index}].function.parameters"] = f"tools[{index}].{schema}"
    return found


def response_fields(fields: Fields) -> dict[str, Any]:
    """The chat's fields of a body of /v1/responses."""
    found = dict(fields.values())
    tools = _listed(fields, "tools")
    found["tools"] = [_function(tool, f"tools[{i}]", "parameters") for i, tool in enumerate(tools)]
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
    answer = fields.get("text")
    if answer is not None:
        format_ = Fields.of(answer, "text").get("format")
        if format_ is not None:
            _check_one_form(fields, "text.format")
            found["response_format"] = _form(Fields.of(format_, "text.format"))
    reasoning = fields.get("reasoning")
    if reasoning is not None:
        found["reasoning_effort"] = Fields.of(reasoning, "reasoning").get("effort")
    return found


def messages_fields(fields: Fields) -> dict[str, Any]:
    """The chat's fields of a body of /v1/messages."""
    found = dict(fields.values())
    tools = _listed(fields, "tools")
    found["tools"] = [
        _function(tool, f"tools[{i}]", "input_schema") for i, tool in enumerate(tools)
    ]
    choice = fields.get("tool_choice")
    if choice is not None:
        asked = Fields.of(choice, "tool_choice")
        refuse_others(asked, "type", "name", "disable_parallel_tool_use")
        kinds = {"auto": "auto", "any": "required", "none": "none"}
        kind = asked.get("type")
        if kind == "tool":
            found["tool_choice"] = _named(asked.get("name"))
        elif isinstance(kind, str) and kind in kinds:
            found["tool_choice"] = kinds[kind]
        else:
            raise RequestError.at(
                "tool_choice.type", f"{shown(kind)}; send auto, any, tool or none"
            )
        is_single = asked.boolean("disable_parallel_tool_use", default=False)
        found["parallel_tool_calls"] = not is_single
    config = fields.get("output_config")
    if config is not None:
        asked = Fields.of(config, "output_config")
        found["reasoning_effort"] = asked.get("effort")
        if asked.get("format") is not None:
            form = Fields.of(asked.get("format"), "output_config.format")
            # Anthropic's schemas have no names.
            found["response_format"] = _form(Fields({"name": "answer", **form.values()}))
    return found


def shows_thinking(fields: Fields) -> bool:
    """Whether an answer of /v1/messages has its reasoning in blocks of its own."""
    thinking = fields.get("thinking")
    if thinking is None:
        return False
    kind = Fields.of(thinking, "thinking").get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise RequestError.at("thinking.type", f"{shown(kind)}; send enabled, adaptive or disabled")
    return bool(kind != "disabled")


def _listed(fields: Fields, key: str) -> list[Any]:
    value = fields.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError.at(key, f"{json_kind(value)}; send a list")
    return value


def _function(tool: Any, path: str, schema: str) -> dict[str, Any]:
    """A tool as the chat has it."""
    fields = Fields.of(tool, path)
    kind = fields.get("type")
    if kind not in (None, "function" if schema == "parameters" else "custom"):
        raise RequestError.at(f"{path}.type", f"{shown(kind)} is not served; send functions")
    refuse_others(fields, "type", "name", "description", schema, "strict", "cache_control")
    named = {"name": fields.get("name"), "description": fields.get("description")}
    more = {"parameters": fields.get(schema), "strict": fields.get("strict")}
    function = {key: value for key, value in (named | more).items() if value is not None}
    return {"type": "function", "function": function}


def _named(name: Any) -> dict[str, Any]:
    """A choice of one function as the chat has it."""
    return {"type": "function", "function": {"name": name}}


def _check_one_form(fields: Fields, name: str) -> None:
    if fields.get("response_format") is not None:
        raise RequestError.at(name, "response_format says what the answer must be, too; send one")


def _form(fields: Fields) -> dict[str, Any]:
    """`response_format` for a form whose schema stands beside its type."""
    kind = fields.get("type")
    if kind != "json_schema":
        # Of a type that is none, that is what is wrong, and not what stands beside it.
        is_known = kind in (None, "text", "json_object", "structural_tag")
        return dict(fields.values()) if is_known else {"type": kind}
    refuse_others(fields, "type", "name", "description", "schema", "strict")
    schema = {key: value for key, value in fields.values().items() if key != "type"}
    return {"type": "json_schema", "json_schema": schema}
