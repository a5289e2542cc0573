"""The bodies of /v1/completions and /v1/chat/completions, and vLLM's of /tokenize and /detokenize;
and what a request says of a conversation, which `cluster.text.chat` renders for the model.

A field without effect is named in the answer and in the log: one that is ignored in silence
misleads the client.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PrivateAttr, WithJsonSchema

from cluster.core import TokenArray
from cluster.errors import RequestError
from cluster.text.chat import text_of, tool_calls_of
from cluster.text.prompt import Held, Message, PlacedMessages, Prompt
from deployments.ingress.api.contract import REQUIRED, Body, Read, instead, supported
from deployments.ingress.sampling import (
    OF_MODEL,
    Alternatives,
    Choices,
    Count,
    ModelName,
    Sampling,
)
from deployments.ingress.spec import GenerationSpec, Limits
from deployments.ingress.tools import TEXT_ARGUMENT, ToolUse
from deployments.ingress.wording import TEXT_OR_OBJECTS, JsonObject, Schema, json_kind

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


class Turn(Body):
    """A turn of a conversation, in the format of any API."""

    is_listed = True
    # As templates read it, each message with its place below this one.
    _messages: PlacedMessages = PrivateAttr(default_factory=list)


# fmt: off
class ChatTurn(Turn):
    """OpenAI's message."""

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

    def check(self) -> None:
        if self.tool_calls and self.role != "assistant":
            raise self.wrong("tool_calls", "only messages of role assistant have some; remove them")
        # An answer may have been reasoning alone.
        may_be_empty = self.role == "assistant" and self._limits.is_lenient
        if self.content is None and not self.tool_calls and not may_be_empty:
            raise self.wrong("content", "missing; send a string or a list of text parts")
        self.tool_calls = read_calls(self.tool_calls or [], "tool_calls")
        self.reasoning_content = self.reasoning_content or self.reasoning
        names = ("tool_calls", "name", "tool_call_id", "reasoning_content")
        others = {name: getattr(self, name) for name in names if getattr(self, name)}
        # Templates ask for the content's length.
        self._messages.append(("", {"role": self.role, "content": self.content or "", **others}))


def read_calls(calls: list[Any], path: str) -> list[JsonObject]:
    """Calls of an earlier answer as templates read them: their arguments are objects."""
    found = tool_calls_of(list(map(_as_function, calls)), path)
    return [checked_call(call, f"{path}[{at}].function.") for at, call in enumerate(found)]


def _as_function(call: Any) -> Any:
    """A call of a custom tool as that of the function which models know it as."""
    custom = call.get("custom") if isinstance(call, dict) else None
    if not isinstance(custom, dict):
        return call
    return call_of(call.get("id"), custom.get("name"), {TEXT_ARGUMENT: custom.get("input")})


def call_of(call_id: Any, name: Any, arguments: Any) -> JsonObject:
    """A call as templates read it."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def checked_call(call: JsonObject, path: str) -> JsonObject:
    """Return a call; raises RequestError for what cannot be called.

    path: what stands before its fields' names."""
    name, arguments = call["function"].get("name"), call["function"]["arguments"]
    if not isinstance(name, str) or not 0 < len(name) <= 64:
        what = json_kind(name) if name else "missing"
        raise RequestError.at(f"{path}name", f"{what}; send the tool's name")
    if not isinstance(arguments, str | dict):
        raise RequestError.at(
            f"{path}arguments", f"{json_kind(arguments)}; send a JSON object as a text"
        )
    return call


OF_MESSAGES = "the conversation"
Turns = Annotated[list[ChatTurn], Field(min_length=1, max_length=MAX_MESSAGES)]


class Harmless(Body):
    """OpenAI's: they affect billing, caching or safety there, never the text."""



class AnsweredConversation(ToolUse, Sampling):
    """A conversation that is answered."""

    def asked(self) -> GenerationSpec:
        return self.generation((self.prompt_of(self.form()),))


class Conversation(ToolUse):
    """Messages, and what the model's chat template is told beside them."""

    messages: Turns = supported(OF_MESSAGES, REQUIRED)
    add_generation_prompt: bool | None = supported("false = the answer's header is not added")
    continue_final_message: bool = supported("the answer goes on with the last message", False)

    def check(self) -> None:
        super().check()
        if self.continue_final_message and self.add_generation_prompt:
            raise self.wrong(
                "continue_final_message",
                "not together with add_generation_prompt; send one of them",
            )

    def ending(self, last: Message) -> tuple[bool, bool]:
        adds, continues = self.add_generation_prompt, self.continue_final_message
        return not continues if adds is None else adds, continues


_TEXT: Schema = {"type": "string", "minLength": 1}
_TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": "max_token_id"}


def _several(one: Schema) -> Schema:
    return {"type": "array", "items": one, "minItems": 1}


TOKENS = _several(_TOKEN)


def token_ids_of(values: Any, limits: Limits) -> TokenArray:
    """The tokens in a list; raises RequestError for one outside the vocabulary."""
    if not isinstance(values, list):
        raise RequestError(f"{json_kind(values)}; send a list of token ids")
    if not values:
        raise RequestError("an empty list of tokens; send at least one")
    if set(map(type, values)) != {int}:
        raise RequestError("a token id is not an integer; send integers")
    limits.check_tokens(min(values), max(values), "")
    return np.array(values, dtype=np.int32)


def _prompts(value: Any, limits: Limits) -> tuple[Prompt, ...]:
    """A string, a list of strings, token ids, or a list of lists of token ids."""
    values = value if isinstance(value, list) else [value]
    kinds = set(map(type, values))
    if kinds == {int} and values is value:
        return (Prompt(token_ids=token_ids_of(value, limits)),)
    if kinds == {list}:
        return tuple(Prompt(token_ids=token_ids_of(item, limits)) for item in values)
    if kinds == {str}:
        if "" in values:
            raise RequestError("an empty string; send at least one character")
        return tuple(Prompt(text=text) for text in values)
    found = json_kind(value)
    if isinstance(value, list):
        found = "a list of " + (", ".join(sorted({*map(json_kind, value)})) or "nothing")
    raise RequestError(f"{found}; send one string or several, token ids, or lists of token ids")


class Scored(Sampling):
    """Text with log-probabilities where the number of alternatives is given."""

    logprobs: Alternatives | None = supported("log-probabilities, with so many alternatives")

    def num_logprobs(self) -> int | None:
        return self.logprobs


# fmt: off
class CompletionBody(Scored, Harmless):
    path, summary = "/v1/completions", "Continue a prompt"
    default_max_tokens = 16  # OpenAI's

    prompt: Annotated[
        tuple[Prompt, ...],
        instead(_prompts, {"anyOf": [_TEXT, _several(_TEXT), TOKENS, _several(TOKENS)]}),
    ] = supported("a text, token ids, or a list of either", REQUIRED)
    max_tokens: Count | None = supported(
        "output tokens, at most; absent = 16; 0 only with echo or prompt_logprobs")
    echo: bool = supported("the prompt comes before the text, with logprobs in them too", False)
    best_of: Choices | None = supported(
        "samples per prompt, of which the likeliest n per token are answered with; not for streams")
    # fmt: on

    def is_prompt_wanted(self) -> bool:
        return self.echo or super().is_prompt_wanted()

    def check(self) -> None:
        super().check()
        best_of, n = self.best_of or self.n, self.n
        if best_of < n:
            raise self.wrong("best_of", f"{best_of} is less than n={n}; raise it")
        if best_of > n and self.stream:
            raise self.wrong(
                "best_of", f"{best_of} exceeds n={n}, which cannot be streamed; send stream: false"
            )
        if self.use_beam_search and self.echo and self.logprobs is not None:
            raise self.wrong(
                "logprobs", "a beam search has none of the prompt's; remove echo or logprobs"
            )

    def asked(self) -> GenerationSpec:
        spec = self.generation(self.prompt, num_samples=self.best_of)
        if not self.echo or self.logprobs is None:
            return spec
        told = max(self.prompt_logprobs or 0, self.logprobs)
        return dataclasses.replace(spec, prompt_logprobs=told)


class Prediction(Body):
    kinds = frozenset({"content"})
    type: Literal["content"] = supported("content", REQUIRED)
    content: TextOrParts = supported("a text, or text parts", REQUIRED)


# fmt: off
class Chat(Conversation, AnsweredConversation, Harmless):
    path, summary = "/v1/chat/completions", "Answer a conversation"

    max_completion_tokens: Count | None = supported(
        "output tokens, at most; 0 only with prompt_logprobs")
    max_tokens: Count | None = supported("the older name of max_completion_tokens")
    logprobs: bool = supported("log-probabilities of the output", False)
    top_logprobs: Alternatives | None = supported("alternatives; needs logprobs")
    prediction: Prediction | None = supported(
        "the output that is expected, for drafters of kind prediction")
    # fmt: on

    def length(self) -> tuple[str, int | None]:
        asked = self.max_completion_tokens
        return super().length() if asked is None else ("max_completion_tokens", asked)

    def check(self) -> None:
        super().check()
        if self.prediction is not None:
            self._expected = self.prediction.content
        top = self.top_logprobs
        if top is not None and not self.logprobs:
            raise self.wrong("top_logprobs", f"{top} needs logprobs; send logprobs: true")

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None



class _MayName(Body):
    """As in vLLM the model may be left out: there is one tokenizer."""

    model: ModelName | None = supported(OF_MODEL)


class Tokenize(_MayName, Conversation):
    path, summary = "/tokenize", "The tokens of a text or of a conversation"
    hidden = ToolUse.all_but("tools", "chat_template_kwargs")

    prompt: str | None = supported("a text; this or messages")
    messages: Turns = supported(OF_MESSAGES, ())
    add_special_tokens: bool = supported("whether a text gets the model's own", True)
    return_token_strs: bool = supported("each token as the vocabulary names it", False)

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (not self.messages):
            raise RequestError.at("prompt", "send either prompt or messages")

    def prompt_of(self, form: Held | None = None) -> Prompt:
        return super().prompt_of(form) if self.prompt is None else Prompt(text=self.prompt)


class Detokenize(_MayName):
    path, summary = "/detokenize", "The text of tokens"

    tokens: Annotated[TokenArray, instead(token_ids_of, TOKENS)] = supported(
        "special ones have text too", REQUIRED
    )
