"""What a conversation says of tools and reasoning, and what both mean for its prompt and answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from cluster.errors import RequestError, joined
from cluster.grammar.json_schema import lenient
from cluster.records import frozen
from cluster.requests.fields import GrammarSpec
from cluster.text.chat import RESERVED_ARGUMENTS
from cluster.text.prompt import ChatUse, Held, Message, PlacedMessages, Prompt
from cluster.text.tool_calls.base import NAME
from deployments.ingress.api.contract import REQUIRED, Body, Read, instead, supported
from deployments.ingress.spec import Limits
from deployments.ingress.wording import TEXT, JsonObject, shown

MAX_TOOLS = 128
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# The one argument of a custom tool.
TEXT_ARGUMENT = "input"


@frozen
class CallChoice:
    """kind: none, auto, required or named.  name: of the function.  place: where that stands.

    is_single: whether one call is made at most."""

    kind: str = "auto"
    name: Any = ""
    place: str = ""
    is_single: bool = False

    def check(self, names: Sequence[str]) -> None:
        """Raise RequestError for a choice among tools of these names that cannot be made."""
        for name in names:
            if names.count(name) > 1:
                raise RequestError.at("tools", f"{name!r} is named twice; name it once")
        if self.kind == "required" and not names:
            raise RequestError.at("tool_choice", "required needs tools; send functions")
        if self.kind == "named" and self.name not in names:
            raise RequestError.at(
                f"tool_choice.{self.place}",
                f"{shown(self.name)} is not one of the tools that can be called",
            )


def _name(name: str, limits: Limits) -> str:
    if not NAME.fullmatch(name):
        raise RequestError(f"{shown(name)}; send up to 64 letters, digits, '_', '-' and '.'")
    return name


def _effort(value: str, limits: Limits) -> str:
    if value and value not in _EFFORTS:
        raise RequestError(f"{shown(value)}; send one of {', '.join(_EFFORTS)}")
    return value


def _choice(value: Any, limits: Limits) -> CallChoice:
    """OpenAI's: a function's name stands in `function` (chats) or beside the type (Responses)."""
    match value:
        case "none" | "auto" | "required":
            return CallChoice(value)
        case {"type": "function" | "custom" as kind}:
            inner = value.get(kind)
            if isinstance(inner, dict):
                return CallChoice("named", inner.get("name"), f"{kind}.name")
            return CallChoice("named", value.get("name"), "name" if inner is None else kind)
        case dict():
            raise RequestError.at(
                "type",
                f"{shown(value.get('type'))} is not served; send function and a name, or "
                "tool_choice none, auto or required",
            )
    raise RequestError(
        f"{shown(value)}; send none, auto, required, or an object that names a function"
    )


Effort = Annotated[str, Read(_effort), Field(max_length=16)]
OF_EFFORT = "for the model's template, where that uses it"
OF_TOOLS = "functions that the answer may call"


class Function(Body):
    """A tool, or what it says of its function."""

    is_listed = True
    name: Annotated[str, Read(_name)] = supported("the name of the function", REQUIRED)
    description: str | None = supported("for the model", max_length=65536)
    parameters: JsonObject | None = supported("a JSON schema")
    strict: bool = supported("calls obey the schema", False)

    def named(self) -> Function:
        """What is called."""
        return self

    def arguments(self, *, is_held: bool) -> JsonObject:
        """The schema that a call obeys.  is_held: even if the tool is not strict."""
        own = self.parameters or {}
        if not self.strict:
            own = lenient(own) if is_held else {}
        return {"type": "object", **own}  # arguments are an object in any case

    def told(self) -> JsonObject:
        """The tool as chat templates know it."""
        # Templates write the fields in this order.
        own = self.model_dump(
            include={"name", "description", "parameters", "strict"}, exclude_unset=True
        )
        parameters = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {**own, "parameters": parameters}}


class _OfText(Function):
    """A custom tool's: its calls are one text each."""


class Custom(Function):
    """A tool that models know as a function of one text."""

    hidden = frozenset({"parameters", "strict"})
    format: JsonObject | None = supported(
        "of a custom tool: told to the model, which is not held to it"
    )

    def named(self) -> Function:
        form = self.format or {}
        grammar = form.get("grammar", form)  # chats have it one level deeper
        told = "the whole input, as it is"
        if isinstance(grammar, dict) and "definition" in grammar:
            told += f"; it obeys this grammar:\n{grammar['definition']}"
        return _OfText.model_construct(
            name=self.name,
            description=self.description or "",
            parameters={
                "type": "object",
                "properties": {TEXT_ARGUMENT: {"type": "string", "description": told}},
                "required": [TEXT_ARGUMENT],
                "additionalProperties": False,
            },
        )


class Tool(Body):
    is_listed = True
    kinds = frozenset({"function", "custom"})
    type: Literal["function", "custom"] = supported("function or custom", REQUIRED)
    function: Function | None = supported("its name, description, parameters and strict")
    custom: Custom | None = supported("its name, description and format")

    def check(self) -> None:
        if getattr(self, self.type) is None:
            raise self.wrong(self.type, f"missing; send {self.rules()[self.type].note}")

    def named(self) -> Function:
        """What is called."""
        function: Function = getattr(self, self.type)
        return function.named()


class ToolUse(Body):
    """A conversation: its tools, and how it becomes a prompt.

    conversation: the field with it.  effort: where it says how much to reason."""

    conversation: ClassVar[str] = "messages"
    effort: ClassVar[str] = "reasoning_effort"
    tools: list[Tool] = supported(OF_TOOLS, (), max_length=MAX_TOOLS)
    tool_choice: Annotated[CallChoice, instead(_choice, {"anyOf": [TEXT, {"type": "object"}]})] = (
        supported(
            "none, auto, required, or a function; calls that are forced obey their schemas",
            CallChoice(),
        )
    )
    parallel_tool_calls: bool = supported("false = one call at most", True)
    reasoning_effort: Effort | None = supported(OF_EFFORT)
    include_reasoning: bool = supported("false = reasoning_content is left out", True)
    chat_template_kwargs: JsonObject = supported("arguments of the model's template", {})
    # What the chat template is given beside messages and tools.
    _arguments: JsonObject = PrivateAttr(default_factory=dict)

    def check(self) -> None:
        super().check()
        given = {
            f"chat_template_kwargs.{key[:40]}": (key, value)
            for key, value in self.chat_template_kwargs.items()
        }
        effort = attrgetter(self.effort)(self)
        if effort:
            given[self.effort] = "reasoning_effort", effort
        for name, (key, value) in given.items():
            reason = "the model's chat template does not use it; remove it"
            if key in RESERVED_ARGUMENTS:
                raise RequestError.at(name, reason)
            if key.isidentifier() and key in self._limits.dialect.template:
                self._arguments[key] = value
            else:
                self.ignore(name, reason)

    def choice(self) -> CallChoice:
        """Who chooses what is called."""
        return self.tool_choice

    def shows_reasoning(self) -> bool:
        """True if the answer has it."""
        return self.include_reasoning

    def said(self) -> PlacedMessages:
        """The messages as templates read them."""
        return [
            (joined(f"{self.conversation}[{number}]", place), told)
            for number, turn in enumerate(getattr(self, self.conversation))
            for place, told in turn._messages
        ]

    def ending(self, last: Message) -> tuple[bool, bool]:
        """Whether the answer's header is added behind the last message, and whether the answer goes
        on with that."""
        return True, False

    def prompt_of(self, form: Held | None = None) -> Prompt:
        """The prompt, with how the answer is read.  form: what a text of that is held to.

        Raises RequestError for tools that cannot be served, naming the field."""
        choice = self.choice()
        functions = [tool.named() for tool in self.tools if not tool._is_left_out]
        choice.check([function.name for function in functions])
        if choice.kind == "none":
            functions = []
        use = self._use(choice, functions, form)
        said = self.said()
        if not said:  # what may come back of an answer may be no part of a prompt
            raise RequestError.at(self.conversation, "nothing for the model; send a message")
        places, messages = zip(*said, strict=True)
        adds_header, continues = self.ending(messages[-1])
        if continues:
            self._arguments["continue_final_message"] = True
        own = dict.fromkeys(("messages", "prompt"), self.conversation)
        own |= {f"messages[{number}]": place for number, place in enumerate(places)}
        return Prompt(
            messages=messages,
            tools=tuple(function.told() for function in functions),
            add_generation_prompt=adds_header,
            arguments=self._arguments,
            use=use,
            names=own,
        )

    def _use(self, choice: CallChoice, functions: Sequence[Function], form: Held | None) -> ChatUse:
        shows, dialect = self.shows_reasoning(), self._limits.dialect
        if not functions:
            return ChatUse(shows_reasoning=shows)
        if dialect.calls is None or "tools" not in dialect.template:
            raise RequestError.at(
                "tools",
                "the model's chat template shows no known format of tool calls; remove them, or "
                "set answers.tool_parser for a template that writes tools",
            )
        is_forced, is_single = choice.kind != "auto", choice.is_single or choice.kind == "named"
        is_parallel = self.parallel_tool_calls and not is_single
        # Messages in channels are calls or text, and no form holds the calls.
        if is_forced or dialect.is_harmony or (form and form[0].kind != "json_schema"):
            form = None
        held = None
        if is_forced or form or any(function.strict for function in functions):
            if dialect.is_harmony:
                name, what = ("tool_choice", choice.kind) if is_forced else ("tools", "strict")
                raise RequestError.at(
                    name,
                    f"{what} is not served for models that answer in channels; send tool_choice "
                    "auto and tools that are not strict",
                )
            # A choice that is forced must be right; what a model chooses itself is held to the
            # tools that are strict.
            source = dialect.calls.grammar(
                [
                    (one.name, one.arguments(is_held=is_forced))
                    for one in functions
                    if choice.kind != "named" or choice.name == one.name
                ],
                is_required=is_forced,
                is_parallel=is_parallel,
                form=form and json.loads(form[0].source),
            )
            held = GrammarSpec("structural_tag", source), form[1] if form else "tools"
        return ChatUse(
            held=held,
            reads_calls=True,
            is_forced=is_forced,
            is_parallel=is_parallel,
            shows_reasoning=shows,
            custom=frozenset(one.name for one in functions if isinstance(one, _OfText)),
        )
