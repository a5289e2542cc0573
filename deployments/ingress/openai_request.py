"""Parses OpenAI's request bodies strictly, because a silently ignored field misleads the client.

Fields that OpenAI does not have use vLLM's names (top_k, min_p, min_tokens, ...).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from cluster.errors import NotFoundError, RequestError
from deployments.ingress.api.contract import Opened
from deployments.ingress.api.table import CHAT, COMPLETIONS
from deployments.ingress.beams import read_beams, with_beams
from deployments.ingress.chat import parse_messages, parse_template
from deployments.ingress.fields import Fields, encodable, json_kind, shown
from deployments.ingress.names import OF_CHATS
from deployments.ingress.predicted import read_prediction, with_prediction
from deployments.ingress.prompt_logprobs import most, read_max_tokens, read_prompt_logprobs
from deployments.ingress.sampling import read_spec
from deployments.ingress.spec import GenerationSpec, Limits, OpenAIRequest, Prompt
from deployments.ingress.tools import ChatUse, read_chat_use

# OpenAI's default for completions without max_tokens.
_COMPLETION_MAX_TOKENS = 16


def parse_completion(values: Mapping[str, Any], limits: Limits) -> OpenAIRequest:
    """Parse the body of POST /v1/completions."""
    opened = COMPLETIONS.open(values, limits.compatibility)
    fields = Fields(values)
    model = model_of(fields, limits)
    num_choices = fields.integer("n", 1, 1, limits.max_choices) or 1
    best_of = fields.integer("best_of", num_choices, 1, limits.max_choices) or num_choices
    if best_of < num_choices:
        raise RequestError.at("best_of", f"{best_of} is less than n={num_choices}; raise it")
    echo = fields.boolean("echo", default=False)
    logprobs = fields.integer("logprobs", None, 0, limits.max_logprobs)
    shown = read_prompt_logprobs(fields, limits)
    prompts = _prompts(fields, limits)
    max_tokens = read_max_tokens(fields, "max_tokens", is_prompt_wanted=echo or shown is not None)
    beams = read_beams(fields, best_of)
    is_ranked = best_of > num_choices and beams is None
    # Samples are ranked by their tokens' log-probabilities.
    reported = 0 if is_ranked and logprobs is None else logprobs
    spec = read_spec(fields, limits, prompts, best_of, max_tokens, reported)
    spec = dataclasses.replace(
        with_beams(spec, beams, num_choices),
        default_max_tokens=_COMPLETION_MAX_TOKENS,
        prompt_logprobs=most(shown, logprobs if echo else None),
    )
    asked = _request(
        fields, opened, spec, model, is_chat=False, echo=echo, num_kept=num_choices,
        shows_logprobs=logprobs is not None, shows_prompt_logprobs=shown,
    )  # fmt: skip
    if is_ranked and asked.stream:
        raise RequestError.at(
            "best_of",
            f"{best_of} exceeds n={num_choices}, which cannot be streamed; send stream: false",
        )
    return asked


def parse_chat(values: Mapping[str, Any], limits: Limits) -> OpenAIRequest:
    """Parse the body of POST /v1/chat/completions."""
    opened = CHAT.open(values, limits.compatibility)
    fields = Fields(values)
    model = model_of(fields, limits)
    num_choices = fields.integer("n", 1, 1, limits.max_choices) or 1
    wants_logprobs = fields.boolean("logprobs", default=False)
    top = fields.integer("top_logprobs", None, 0, limits.max_logprobs)
    if top is not None and not wants_logprobs:
        raise RequestError.at("top_logprobs", f"{top} needs logprobs; send logprobs: true")
    use = read_chat_use(fields, limits.dialect)
    newer = "max_completion_tokens"
    is_newer = fields.get(newer) is not None
    prompt = Prompt(
        messages=parse_messages(fields.get("messages")),
        tools=use.tools,
        template=parse_template(fields, use.template_arguments or {}),
        names=OF_CHATS.also(max_tokens=newer if is_newer else ""),
    )
    shown = read_prompt_logprobs(fields, limits)
    name = newer if is_newer else "max_tokens"
    max_tokens = read_max_tokens(fields, name, is_prompt_wanted=shown is not None)
    logprobs = (top or 0) if wants_logprobs else None
    spec = read_spec(fields, limits, (prompt,), num_choices, max_tokens, logprobs)
    spec = dataclasses.replace(
        with_prediction(with_chat_use(spec, use), read_prediction(fields), limits),
        prompt_logprobs=shown,
    )
    spec = with_beams(spec, read_beams(fields, num_choices), num_choices)
    return _request(
        fields, opened, spec, model, is_chat=True, num_kept=num_choices,
        shows_logprobs=wants_logprobs, shows_prompt_logprobs=shown,
    )  # fmt: skip


def with_chat_use(spec: GenerationSpec, use: ChatUse) -> GenerationSpec:
    """`spec`, whose answers are read so, and held to the grammar of its tools.

    Raises RequestError where a forced call and another form are asked for at once."""
    params = spec.params
    if use.grammar is not None:
        if params.grammar is not None:
            name = spec.grammar_field
            raise RequestError.at(
                name,
                "the tools say what the answer must be, too; remove it, or send "
                "tool_choice auto and tools that are not strict",
            )
        params = dataclasses.replace(params, grammar=use.grammar)
        spec = dataclasses.replace(spec, grammar_field="tools")
    return dataclasses.replace(spec, params=params, chat=use)


def _request(
    fields: Fields, opened: Opened, spec: GenerationSpec, model: str, **own: Any
) -> OpenAIRequest:
    """own: what the endpoint adds, by the names of the result."""
    stream = fields.boolean("stream", default=False)
    include_usage = continuous = False
    if fields.get("stream_options") is not None and not stream:
        raise RequestError.at("stream_options", "only for streams; send stream: true or remove it")
    if (options := fields.object("stream_options")) is not None:
        include_usage = options.boolean("include_usage", default=False)
        continuous = options.boolean("continuous_usage_stats", default=False)
    return OpenAIRequest(
        spec=spec,
        model=model,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and continuous,
        return_token_ids=fields.boolean("return_token_ids", default=False),
        names_token_ids=fields.boolean("return_tokens_as_token_ids", default=False),
        ignored=tuple(opened.ignored),
        **own,
    )


def model_of(fields: Fields, limits: Limits) -> str:
    """The name in `model`; raises NotFoundError or RequestError unless it is served."""
    model = fields.string("model", "")
    check_model(model, limits)
    return model


def check_model(model: str, limits: Limits) -> None:
    """Raise NotFoundError or RequestError unless `model` is a name of what is served."""
    if not model:
        raise RequestError.at("model", f"missing; send {limits.model_name!r}")
    if model not in limits.model_names:
        served = " or ".join(map(repr, limits.model_names))
        raise NotFoundError.at("model", f"{shown(model)} is not served; ask for {served}")


def _prompts(fields: Fields, limits: Limits) -> tuple[Prompt, ...]:
    """A string, a list of strings, token ids, or a list of lists of token ids."""
    value = fields.get("prompt")
    if isinstance(value, str):
        return (Prompt(text=_prompt_text(value)),)
    if not isinstance(value, list):
        raise RequestError.at(
            "prompt", f"{json_kind(value)}; send a string, token ids or a list of either"
        )
    if not value:
        raise RequestError.at("prompt", "an empty list; send at least one token or text")
    kinds = set(map(type, value))
    if kinds == {int}:
        return (Prompt(token_ids=token_ids_of(value, limits, "prompt")),)
    if kinds == {str}:
        return tuple(Prompt(text=_prompt_text(item)) for item in value)
    if kinds == {list}:
        return tuple(Prompt(token_ids=token_ids_of(item, limits, "prompt")) for item in value)
    found = ", ".join(sorted({json_kind(item) for item in value}))
    raise RequestError.at(
        "prompt",
        f"a list of {found}; send strings only, token ids only, or lists of token ids only",
    )


def _prompt_text(text: str) -> str:
    if not text:
        raise RequestError.at("prompt", "an empty string; send at least one character")
    return encodable(text, "prompt")


def token_ids_of(
    values: list[Any], limits: Limits, name: str
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The tokens in the field `name`; raises RequestError for one outside the vocabulary."""
    if not values:
        raise RequestError.at(name, "an empty list of tokens; send at least one")
    if set(map(type, values)) != {int}:
        raise RequestError.at(name, "a token id is not an integer; send integers")
    check_range(min(values), max(values), name, limits)
    return np.array(values, dtype=np.int32)


def check_range(low: int, high: int, name: str, limits: Limits) -> None:
    """Raise RequestError, naming the field, unless all tokens from `low` to `high` are known."""
    if low < 0 or high >= limits.vocab_size:
        bad = shown(low if low < 0 else high)
        raise RequestError.at(
            name, f"token id {bad} is out of range; the vocabulary has {limits.vocab_size} tokens"
        )
