"""What a conversation says of tools and reasoning, and what both mean for its prompt and answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from cluster.errors import RequestError
from cluster.requests.grammar_spec import GrammarSpec
from cluster.text.chat import RESERVED_ARGUMENTS
from cluster.text.dialect import Dialect
from cluster.text.tool_calls.base import NAME
from deployments.ingress.api.contract import REQUIRED, Body, Read, instead, refused, supported
from deployments.ingress.api.wording import TEXT
from deployments.ingress.fields import encodable_json, shown
from deployments.ingress.spec import ChatUse, Limits

MAX_TOOLS = 128
_ANY_ARGUMENTS = {"type": "object"}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True, slots=True)
class Choice:
    """kind: none, auto, required or named.  name: of the function.  place: where that stands.

    is_single: whether one call is made at most."""

    kind: str = "auto"
    name: Any = ""
    place: str = ""
    is_single: bool = False


def _name(name: str, limits: Limits) -> str:
    if not NAME.fullmatch(name):
        raise RequestError.at("", f"{shown(name)}; send up to 64 letters, digits, '_', '-' and '.'")
    return name


def _effort(value: str, limits: Limits) -> str:
    if value and value not in _EFFORTS:
        raise RequestError.at("", f"{shown(value)}; send one of {', '.join(_EFFORTS)}")
    return value


def _choice(value: Any, limits: Limits) -> Choice:
    """OpenAI's: a function's name stands in `function` (chats) or beside the type (Responses)."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return Choice(value)
    if not isinstance(value, dict):
        remedy = "send none, auto, required, or an object that names a function"
        raise RequestError.at("", f"{shown(value)}; {remedy}")
    if value.get("type") != "function":
        remedy = "send function and a name, or tool_choice none, auto or required"
        raise RequestError.at("type", f"{shown(value.get('type'))} is not served; {remedy}")
    inner = value.get("function")
    if isinstance(inner, dict):
        return Choice("named", inner.get("name"), "function.name")
    return Choice("named", value.get("name"), "name" if inner is None else "function")


Effort = Annotated[str, Read(_effort)]
JsonObject = Annotated[dict[str, Any], Read(lambda value, _: encodable_json(value, ""))]
OF_EFFORT = "for the model's template, where that uses it"
OF_TOOLS = "functions that the answer may call"


class Function(Body):
    """A tool, or what it says of its function."""

    is_listed: ClassVar[bool] = False
    name: Annotated[str, Read(_name)] = supported("the name of the function", REQUIRED)
    description: str | None = supported("for the model", max_length=65536)
    parameters: JsonObject | None = supported("a JSON schema")
    strict: bool = supported("calls obey the schema", False)

    def named(self) -> Function:
        """What is called."""
        return self

    def arguments(self, *, is_held: bool) -> Mapping[str, Any]:
        """The schema that a call obeys.  is_held: even if the tool is not strict."""
        is_any = self.parameters is None or not (self.strict or is_held)
        return _ANY_ARGUMENTS if is_any else self.parameters or {}

    def told(self) -> Mapping[str, Any]:
        """The tool as chat templates know it."""
        own = self.model_dump(include={*Function.model_fields}, exclude_unset=True)
        return {"type": "function", "function": own}


class Tool(Body):
    is_listed: ClassVar[bool] = False
    type: Literal["function"] = supported("function", REQUIRED)
    function: Function = supported("its name, description, parameters and strict", REQUIRED)

    def named(self) -> Function:
        """What is called."""
        return self.function


class ToolUse(Body):
    """Tools of a chat."""

    tools: list[Tool] = supported(OF_TOOLS, (), max_length=MAX_TOOLS)
    tool_choice: Annotated[Choice, instead(_choice, {"anyOf": [TEXT, {"type": "object"}]})] = (
        supported("none, auto, required, or a function; calls that are forced obey their schemas",
                  Choice())
    )  # fmt: skip
    parallel_tool_calls: bool = supported("false = one call at most", True)
    functions: Any = refused("send tools", [])
    function_call: Any = refused("send tool_choice", "none", "auto")
    reasoning_effort: Effort | None = supported(OF_EFFORT, max_length=16)
    include_reasoning: bool = supported("false = reasoning_content is left out", True)
    thinking_token_budget: Any = refused("remove it; send max_tokens")

    def choice(self) -> Choice:
        """Who chooses what is called."""
        return self.tool_choice

    def effort(self) -> tuple[str, str | None]:
        """Where it says how much to reason, and how much."""
        return "reasoning_effort", self.reasoning_effort

    def shows_reasoning(self) -> bool:
        """True if the answer has it."""
        return self.include_reasoning

    def use(self, dialect: Dialect, given: Mapping[str, Any] | None = None) -> ChatUse:
        """What this means for the prompt and the answer.  given: arguments of the template.

        Raises RequestError for tools that cannot be served, naming the field."""
        functions, choice = [tool.named() for tool in self.tools], self.choice()
        arguments, shows = self._arguments(dialect, given or {}), self.shows_reasoning()
        self._check_choice([function.name for function in functions])
        if not functions or choice.kind == "none":
            return ChatUse(template_arguments=arguments, shows_reasoning=shows)
        if dialect.calls is None or "tools" not in dialect.template:
            raise RequestError.at(
                "tools",
                "the model's chat template shows no known format of tool calls; remove them, or "
                "set answers.tool_parser for a template that writes tools",
            )
        is_parallel = self.parallel_tool_calls and not choice.is_single
        grammar = _grammar(dialect, functions, choice, is_parallel=is_parallel)
        told = tuple(function.told() for function in functions)
        return ChatUse(told, grammar, True, choice.kind != "auto", is_parallel, arguments, shows)

    def _check_choice(self, names: Sequence[str]) -> None:
        choice = self.choice()
        doubled = next((name for name in names if names.count(name) > 1), None)
        if doubled is not None:
            raise RequestError.at("tools", f"{doubled!r} is named twice; name it once")
        if choice.kind == "required" and not names:
            raise RequestError.at("tool_choice", "required needs tools; send some")
        if choice.kind == "named" and choice.name not in names:
            reason = f"{shown(choice.name)} is not one of the tools"
            raise RequestError.at(f"tool_choice.{choice.place}", reason)

    def _arguments(self, dialect: Dialect, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """What else the chat template is given; raises RequestError for what it does not use."""
        place, effort = self.effort()
        found = {**given, **({"reasoning_effort": effort} if effort else {})}
        for key in found:
            if key in RESERVED_ARGUMENTS or not key.isidentifier() or key not in dialect.template:
                name = (
                    place
                    if effort and key == "reasoning_effort"
                    else f"chat_template_kwargs.{key[:40]}"
                )
                raise RequestError.at(name, "the model's chat template does not use it; remove it")
        return found


def _grammar(
    dialect: Dialect, functions: Sequence[Function], choice: Choice, *, is_parallel: bool
) -> GrammarSpec | None:
    is_required = choice.kind != "auto"
    if not is_required and not any(function.strict for function in functions):
        return None
    if dialect.is_harmony:
        name = "tool_choice" if is_required else "tools"
        what = choice.kind if is_required else "strict"
        raise RequestError.at(
            name,
            f"{what} is not served for models that answer in channels; send tool_choice auto and "
            "tools that are not strict",
        )
    assert dialect.calls is not None
    # A choice that is forced must be right; what a model chooses itself is held to strict tools.
    wanted = [one for one in functions if choice.kind != "named" or choice.name == one.name]
    schemas = [(one.name, one.arguments(is_held=is_required)) for one in wanted]
    is_parallel = is_parallel and choice.kind != "named"
    source = dialect.calls.grammar(schemas, is_required=is_required, is_parallel=is_parallel)
    return GrammarSpec("structural_tag", source)
