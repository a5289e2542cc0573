"""The bodies of /v1/completions and /v1/chat/completions, and vLLM's of /tokenize and /detokenize.

A field without effect is named in the answer and in the log: one that is ignored in silence
misleads the client.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import numpy as np

from cluster.core import TokenArray
from cluster.errors import RequestError
from deployments.ingress.api.contract import REQUIRED, Body, instead, supported
from deployments.ingress.chat import (
    OF_MESSAGES,
    AnsweredConversation,
    Conversation,
    Harmless,
    TextOrParts,
    Turns,
)
from deployments.ingress.sampling import (
    OF_MODEL,
    Alternatives,
    Choices,
    Count,
    ModelName,
    Sampling,
)
from deployments.ingress.spec import ChatUse, GenerationSpec, Held, Limits, Prompt
from deployments.ingress.tools import ToolUse
from deployments.ingress.wording import Schema, json_kind, shown

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
    check_range(min(values), max(values), "", limits)
    return np.array(values, dtype=np.int32)


def check_range(low: int, high: int, name: str, limits: Limits) -> None:
    """Raise RequestError, naming the field, unless all tokens from `low` to `high` are known."""
    if low < 0 or high >= limits.vocab_size:
        bad, known = shown(low if low < 0 else high), limits.vocab_size
        raise RequestError.at(
            name, f"token id {bad} is out of range; the vocabulary has {known} tokens"
        )


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


# fmt: off
class CompletionBody(Sampling, Harmless):
    path, summary = "/v1/completions", "Continue a prompt"
    default_max_tokens = 16  # OpenAI's

    prompt: Annotated[
        tuple[Prompt, ...],
        instead(_prompts, {"anyOf": [_TEXT, _several(_TEXT), TOKENS, _several(TOKENS)]}),
    ] = supported("a text, token ids, or a list of either", REQUIRED)
    max_tokens: Count | None = supported(
        "output tokens, at most; absent = 16; 0 only with echo or prompt_logprobs")
    logprobs: Alternatives | None = supported("log-probabilities, with so many alternatives")
    echo: bool = supported("the prompt comes before the text, with logprobs in them too", False)
    best_of: Choices | None = supported(
        "samples per prompt, of which the likeliest n per token are answered with; not for streams")
    # fmt: on

    def is_prompt_wanted(self) -> bool:
        return self.echo or super().is_prompt_wanted()

    def check(self, limits: Limits) -> None:
        super().check(limits)
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

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def asked(self, limits: Limits) -> GenerationSpec:
        best_of, logprobs = self.best_of or self.n, self.logprobs
        # Samples are ranked by their tokens' log-probabilities; beams are ranked already.
        if best_of > self.n and not self.use_beam_search and logprobs is None:
            logprobs = 0
        spec = self.generation(limits, self.prompt, logprobs, num_samples=best_of)
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

    def check(self, limits: Limits) -> None:
        super().check(limits)
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

    text: str | None = supported("a text; this or messages", alias="prompt")
    messages: Turns = supported(OF_MESSAGES, ())
    add_special_tokens: bool = supported("whether a text gets the model's own", True)
    return_token_strs: bool = supported("each token as the vocabulary names it", False)

    def check(self, limits: Limits) -> None:
        super().check(limits)
        if (self.text is None) == (not self.messages):
            raise RequestError.at("prompt", "send either prompt or messages")

    def prompt_of(self, limits: Limits, form: Held | None = None) -> tuple[Prompt, ChatUse]:
        if self.text is None:
            return super().prompt_of(limits, form)
        return Prompt(text=self.text), ChatUse()


class Detokenize(_MayName):
    path, summary = "/detokenize", "The text of tokens"

    tokens: Annotated[TokenArray, instead(token_ids_of, TOKENS)] = supported(
        "special ones have text too", REQUIRED
    )
