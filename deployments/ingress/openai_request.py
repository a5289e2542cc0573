"""Parses OpenAI's request bodies strictly, because a silently ignored field misleads the client.

Fields that OpenAI does not have use vLLM's names (top_k, min_p, min_tokens, ...).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from cluster.errors import NotFoundError, RequestError
from deployments.ingress.chat import parse_messages
from deployments.ingress.fields import Fields, encodable, json_kind, shown
from deployments.ingress.sampling import read_spec
from deployments.ingress.spec import GenerationSpec, Limits, OpenAIRequest, Prompt

_MAX_TOKENS = 2**31 - 1
# OpenAI's default for completions without max_tokens.
_COMPLETION_MAX_TOKENS = 16

_SHARED = (
    "model", "temperature", "top_p", "top_k", "min_p", "n", "stream", "stream_options", "stop",
    "stop_token_ids", "max_tokens", "min_tokens", "ignore_eos", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "user", "metadata",
    "speculation", "logprobs", "return_token_ids", "return_draft_sources", "add_special_tokens",
    "cache_salt",
)  # fmt: skip
_COMPLETION = (*_SHARED, "prompt", "echo", "best_of")
_CHAT = (*_SHARED, "messages", "max_completion_tokens", "top_logprobs")

# Accepted with any value: they affect billing, caching or safety at OpenAI, never the text.
_HARMLESS = (
    "service_tier", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
)  # fmt: skip

# Not supported: accepted only with these values, which ask for the default behaviour.
_UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "suffix": ((None, ""), "remove it; the model only continues text"),
    "tools": ((None, []), "remove it; tool calls are not served"),
    "tool_choice": ((None, "none", "auto"), "remove it; tool calls are not served"),
    "functions": ((None, []), "remove it; tool calls are not served"),
    "function_call": ((None, "none", "auto"), "remove it; tool calls are not served"),
    "response_format": ((None, {"type": "text"}), 'send {"type": "text"} or remove it'),
    "prediction": ((None,), "remove it; predicted outputs are not served"),
    "modalities": ((None, ["text"]), 'send ["text"] or remove it'),
    "audio": ((None,), "remove it; only text is served"),
    "reasoning_effort": ((None,), "remove it; the model has no reasoning mode"),
    "verbosity": ((None, "medium"), "remove it"),
    "web_search_options": ((None,), "remove it; there is no web search"),
    "skip_special_tokens": ((None, True), "remove it; special tokens are never part of the text"),
    "include_stop_str_in_output": ((None, False), "remove it; the stop string is never part of it"),
    "add_generation_prompt": ((None, True), "remove it; the answer's header is always added"),
    "continue_final_message": ((None, False), "remove it"),
    "chat_template": ((None,), "remove it; the tokenizer's own template is used"),
}


def parse_completion(values: Mapping[str, Any], limits: Limits) -> OpenAIRequest:
    """Parse the body of POST /v1/completions."""
    fields = Fields(values)
    _check_known(fields, _COMPLETION)
    model = _model(fields, limits)
    num_choices = fields.integer("n", 1, 1, limits.max_choices) or 1
    best_of = fields.integer("best_of", num_choices, 1, limits.max_choices)
    if best_of != num_choices:
        raise RequestError(f"best_of: {best_of} is not n={num_choices}; remove it", param="best_of")
    echo = fields.boolean("echo", default=False)
    logprobs = fields.integer("logprobs", None, 0, limits.max_logprobs)
    if echo and logprobs is not None:
        raise RequestError(
            "logprobs: not served for the prompt's tokens; remove echo or logprobs",
            param="logprobs",
        )
    prompts = _prompts(fields, limits)
    max_tokens = fields.integer("max_tokens", 0, 1, _MAX_TOKENS) or 0
    spec = read_spec(fields, limits, prompts, num_choices, max_tokens, logprobs)
    spec = dataclasses.replace(spec, default_max_tokens=_COMPLETION_MAX_TOKENS)
    return _request(fields, spec, model, is_chat=False, echo=echo)


def parse_chat(values: Mapping[str, Any], limits: Limits) -> OpenAIRequest:
    """Parse the body of POST /v1/chat/completions."""
    fields = Fields(values)
    _check_known(fields, _CHAT)
    model = _model(fields, limits)
    num_choices = fields.integer("n", 1, 1, limits.max_choices) or 1
    wants_logprobs = fields.boolean("logprobs", default=False)
    top = fields.integer("top_logprobs", None, 0, limits.max_logprobs)
    if top is not None and not wants_logprobs:
        raise RequestError(
            f"top_logprobs: {top} needs logprobs; send logprobs: true", param="top_logprobs"
        )
    prompt = Prompt(messages=parse_messages(fields.get("messages")))
    old = fields.integer("max_tokens", 0, 1, _MAX_TOKENS) or 0
    max_tokens = fields.integer("max_completion_tokens", old, 1, _MAX_TOKENS) or 0
    logprobs = (top or 0) if wants_logprobs else None
    spec = read_spec(fields, limits, (prompt,), num_choices, max_tokens, logprobs)
    return _request(fields, spec, model, is_chat=True, echo=False)


def _request(
    fields: Fields, spec: GenerationSpec, model: str, *, is_chat: bool, echo: bool
) -> OpenAIRequest:
    stream = fields.boolean("stream", default=False)
    include_usage = False
    if fields.get("stream_options") is not None:
        if not stream:
            raise RequestError(
                "stream_options: only for streams; send stream: true or remove it",
                param="stream_options",
            )
        options = Fields.of(fields.get("stream_options"), "stream_options")
        options.refuse_unknown(("include_usage", "include_obfuscation"))
        include_usage = options.boolean("include_usage", default=False)
        options.boolean("include_obfuscation", default=False)
    return OpenAIRequest(
        spec=spec,
        model=model,
        is_chat=is_chat,
        stream=stream,
        include_usage=include_usage,
        echo=echo,
        return_token_ids=fields.boolean("return_token_ids", default=False),
    )


def _check_known(fields: Fields, known: tuple[str, ...]) -> None:
    fields.refuse_unknown((*known, *_HARMLESS, *_UNSUPPORTED))
    for key, (accepted, remedy) in _UNSUPPORTED.items():
        value = fields.get(key)
        # `1 == True` in Python, so types are compared as well.
        if not any(type(value) is type(option) and value == option for option in accepted):
            raise RequestError(f"{key}: {shown(value)} is not supported; {remedy}", param=key)


def _model(fields: Fields, limits: Limits) -> str:
    model = fields.string("model", "")
    check_model(model, limits)
    return model


def check_model(model: str, limits: Limits) -> None:
    """Raise NotFoundError or RequestError unless `model` is the served model."""
    if not model:
        raise RequestError(f"model: missing; send {limits.model_name!r}", param="model")
    if model != limits.model_name:
        raise NotFoundError(
            f"model: {shown(model)} is not served; ask for {limits.model_name!r}", param="model"
        )


def _prompts(fields: Fields, limits: Limits) -> tuple[Prompt, ...]:
    """A string, a list of strings, token ids, or a list of lists of token ids."""
    value = fields.get("prompt")
    if isinstance(value, str):
        return (Prompt(text=_prompt_text(value)),)
    if not isinstance(value, list):
        raise RequestError(
            f"prompt: {json_kind(value)}; send a string, token ids or a list of either",
            param="prompt",
        )
    if not value:
        raise RequestError("prompt: an empty list; send at least one token or text", param="prompt")
    kinds = set(map(type, value))
    if kinds == {int}:
        return (Prompt(token_ids=_token_ids(value, limits)),)
    if kinds == {str}:
        return tuple(Prompt(text=_prompt_text(item)) for item in value)
    if kinds == {list}:
        return tuple(Prompt(token_ids=_token_ids(item, limits)) for item in value)
    found = ", ".join(sorted({json_kind(item) for item in value}))
    raise RequestError(
        f"prompt: a list of {found}; send strings only, token ids only, or lists of token ids only",
        param="prompt",
    )


def _prompt_text(text: str) -> str:
    if not text:
        raise RequestError("prompt: an empty string; send at least one character", param="prompt")
    return encodable(text, "prompt")


def _token_ids(values: list[Any], limits: Limits) -> np.ndarray[Any, np.dtype[np.int32]]:
    if not values:
        raise RequestError("prompt: an empty list of tokens; send at least one", param="prompt")
    if set(map(type, values)) != {int}:
        raise RequestError("prompt: a token id is not an integer; send integers", param="prompt")
    if min(values) < 0 or max(values) >= limits.vocab_size:
        bad = min(values) if min(values) < 0 else max(values)
        raise RequestError(
            f"prompt: token id {shown(bad)} is out of range; the vocabulary has "
            f"{limits.vocab_size} tokens",
            param="prompt",
        )
    return np.array(values, dtype=np.int32)
