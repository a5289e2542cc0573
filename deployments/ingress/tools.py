"""Reads what a chat says of tools and reasoning, and what both mean for its prompt and answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import RequestError
from cluster.requests.grammar_spec import GrammarSpec
from cluster.text.chat import RESERVED_ARGUMENTS
from cluster.text.dialect import Dialect
from cluster.text.tool_calls.base import NAME
from deployments.ingress.fields import Fields, encodable_json, json_kind, shown

_MAX_TOOLS = 128
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ChatUse:
    """tools: as the template gets them.  grammar: of the calls, None = they are not constrained.

    reads_calls: whether calls are looked for in the answer.  is_forced: whether it must be calls.
    is_parallel: whether it may have several.  template_arguments: for the template.
    shows_reasoning: whether it is sent.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    grammar: GrammarSpec | None = None
    reads_calls: bool = False
    is_forced: bool = False
    is_parallel: bool = True
    template_arguments: Mapping[str, Any] | None = None
    shows_reasoning: bool = True


@dataclass(frozen=True, slots=True)
class _Tool:
    name: str
    schema: Mapping[str, Any]
    is_strict: bool


def read_chat_use(fields: Fields, dialect: Dialect) -> ChatUse:
    """Raises RequestError for tools that cannot be served, naming the field."""
    values = fields.listed("tools") or []
    arguments = template_arguments(fields, dialect)
    shows = fields.boolean("include_reasoning", default=True)
    is_parallel = fields.boolean("parallel_tool_calls", default=True)
    tools = _tools(values)
    choice, named = _choice(fields.get("tool_choice"), tools)
    if not tools or choice == "none":
        return ChatUse(template_arguments=arguments, shows_reasoning=shows)
    if dialect.calls is None or "tools" not in dialect.template:
        raise RequestError.at(
            "tools",
            "the model's chat template shows no known format of tool calls; remove them, or "
            "set answers.tool_parser for a template that writes tools",
        )
    grammar = _grammar(dialect, tools, choice, named, is_parallel=is_parallel)
    is_forced = choice != "auto"
    return ChatUse(tuple(values), grammar, True, is_forced, is_parallel, arguments, shows)


def _grammar(
    dialect: Dialect, tools: Sequence[_Tool], choice: str, named: str, *, is_parallel: bool
) -> GrammarSpec | None:
    is_required = choice != "auto"
    if not is_required and not any(tool.is_strict for tool in tools):
        return None
    if dialect.is_harmony:
        what = f"tool_choice: {choice}" if is_required else "tools: strict"
        raise RequestError(
            f"{what} is not served for models that answer in channels; send tool_choice auto and "
            "tools that are not strict",
            param="tool_choice" if is_required else "tools",
        )
    assert dialect.calls is not None
    wanted = [tool for tool in tools if named in ("", tool.name)]
    # A choice that is forced must be right; what a model chooses itself is held to strict tools.
    schemas = [
        (tool.name, tool.schema if tool.is_strict or is_required else _ANY_ARGUMENTS)
        for tool in wanted
    ]
    source = dialect.calls.grammar(
        schemas, is_required=is_required, is_parallel=is_parallel and not named
    )
    return GrammarSpec("structural_tag", source)


def _tools(values: Sequence[Any]) -> list[_Tool]:
    if len(values) > _MAX_TOOLS:
        raise RequestError.at("tools", f"{len(values)}; send at most {_MAX_TOOLS}")
    tools = [_tool(value, f"tools[{index}]") for index, value in enumerate(values)]
    names = [tool.name for tool in tools]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise RequestError.at("tools", f"{doubled!r} is named twice; name it once")
    return tools


def _tool(value: Any, path: str) -> _Tool:
    fields = Fields.of(value, path)
    fields.refuse_others("type", "function")
    if fields.get("type") != "function":
        raise fields.wrong("type", f"{shown(fields.get('type'))}; send function")
    function = Fields.of(value.get("function"), f"{path}.function")
    function.refuse_others("name", "description", "parameters", "strict")
    name = function.string("name", "", max_len=64)
    if not NAME.fullmatch(name):
        raise function.wrong(
            "name", f"{shown(name)}; send up to 64 letters, digits, '_', '-' and '.'"
        )
    function.string("description", "", max_len=65536)
    schema = function.get("parameters")
    if schema is None:
        schema = _ANY_ARGUMENTS
    if not isinstance(schema, dict):
        raise function.wrong("parameters", f"{json_kind(schema)}; send a JSON schema")
    encodable_json(schema, function.name("parameters"))
    return _Tool(name, schema, function.boolean("strict", default=False))


def _choice(value: Any, tools: Sequence[_Tool]) -> tuple[str, str]:
    """none, auto, required or named, and the name."""
    if value is None:
        return "auto", ""
    if value in ("none", "auto", "required"):
        if value == "required" and not tools:
            raise RequestError.at("tool_choice", "required needs tools; send some")
        return value, ""
    if not isinstance(value, dict) or value.get("type") != "function":
        raise RequestError.at(
            "tool_choice",
            f"{shown(value)}; send none, auto, required, or an object that names a function",
        )
    name = Fields.of(value.get("function"), "tool_choice.function").string("name", "", max_len=64)
    if name not in [tool.name for tool in tools]:
        raise RequestError.at("tool_choice.function.name", f"{shown(name)} is not one of the tools")
    return "named", name


def template_arguments(fields: Fields, dialect: Dialect) -> Mapping[str, Any]:
    """Parse what else the chat template is given; raises RequestError for what it does not use."""
    found: dict[str, Any] = {}
    asked = fields.get("chat_template_kwargs")
    if asked is not None:
        asked = encodable_json(asked, "chat_template_kwargs")
        found |= Fields.of(asked, "chat_template_kwargs").values()
    effort = fields.string("reasoning_effort", "", max_len=16)
    if effort:
        if effort not in _EFFORTS:
            raise RequestError.at(
                "reasoning_effort", f"{shown(effort)}; send one of {', '.join(_EFFORTS)}"
            )
        found["reasoning_effort"] = effort
    for key in found:
        if key in RESERVED_ARGUMENTS or not key.isidentifier() or key not in dialect.template:
            name = key if key == "reasoning_effort" else f"chat_template_kwargs.{key[:40]}"
            raise RequestError.at(name, "the model's chat template does not use it; remove it")
    return found
