"""Tokenises prompts and predictions, after a length check and without blocking the event loop; and
what a request's prompts and output may be, once the prompts have tokens."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.core import SpeculationStats, TokenArray
from cluster.errors import ContextLengthError, RequestError
from cluster.spec.params import MAX_PREDICTION_TOKENS
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.spec import GenerationSpec, Prompt

# Encoding this much text takes about two milliseconds; more is encoded in another thread.
_INLINE_CHARACTERS = 8192


async def prediction_ids(
    spec: GenerationSpec, tokenizer: Tokenizer, max_chars_per_token: float
) -> tuple[int, ...]:
    """Its tokens, as the output would have them; raises RequestError for too many of them.

    () where no drafter would read them.
    """
    text = spec.prediction
    if not text or not spec.prediction_drafters:
        return ()
    _check_prediction(len(text), "characters", int(MAX_PREDICTION_TOKENS * max_chars_per_token))
    prompts = [Prompt(text=text)]
    (found,) = await encode_all(
        prompts, tokenizer, 0, max_chars_per_token, add_special_tokens=False
    )
    _check_prediction(len(found), "tokens", MAX_PREDICTION_TOKENS)
    return tuple(found.tolist())


def _check_prediction(count: int, what: str, limit: int) -> None:
    if count > limit:
        reason = f"{count} {what}; at most {limit} are read"
        raise RequestError.at("prediction", f"{reason}; send the part that the output begins with")


def prediction_counts(spec: GenerationSpec, stats: SpeculationStats) -> Mapping[str, int]:
    """Tokens of the prediction that were drafted and became output, and those that did not.

    Whoever else had proposed them.
    """
    names = spec.prediction_drafters
    counts = stats.accepted_by_drafter, stats.shared_by_drafter
    accepted = sum(count.get(name, 0) for count in counts for name in names)
    verified = sum(stats.verified_by_drafter.get(name, 0) for name in names)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": verified - accepted,
    }


def prediction_idle(spec: GenerationSpec) -> dict[str, Any]:
    """Why nobody drafts from its prediction; empty where somebody does, or it has none."""
    if not spec.prediction or spec.prediction_drafters:
        return {}
    is_enabled = spec.speculation.enabled and spec.speculation.max_draft_tokens != 0
    return {"prediction_idle_because": "no_prediction_drafter" if is_enabled else "disabled"}


# The fixed cost of a message, as a number of characters that are encoded in the same time.
_MESSAGE_CHARACTERS = 64


async def encode_all(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    max_context_len: int,
    max_chars_per_token: float,
    *,
    add_special_tokens: bool,
) -> list[TokenArray]:
    """The token ids of every prompt; encoded in another thread if they are long together.

    max_context_len: tokens, 0 = unknown.  Raises ContextLengthError, before it encodes anything,
    for text that is too long for the context.
    """
    counts = list(map(_num_characters, prompts))
    for count in counts:
        least = math.ceil(count / max_chars_per_token)
        if max_context_len and least > max_context_len:
            raise ContextLengthError.of(
                least,
                max_context_len,
                f"{count} characters were taken as at least so many tokens, by "
                "ingress.max_chars_per_token; reduce the length of the prompt",
            )

    def encode(prompt: Prompt) -> TokenArray:
        if prompt.token_ids is not None:
            return prompt.token_ids
        if prompt.messages is not None:
            return tokenizer.apply_chat_template(
                prompt.messages,
                tools=prompt.tools,
                add_generation_prompt=prompt.add_generation_prompt,
                template_arguments=prompt.arguments,
            )
        return tokenizer.encode(prompt.text or "", add_special_tokens=add_special_tokens)

    work = sum(counts)
    for message in (message for prompt in prompts for message in prompt.messages or ()):
        # Templates may leave earlier reasoning out, so it counts here alone.
        work += _MESSAGE_CHARACTERS + len(message.get("reasoning_content", ""))
    # Nobody knows what a template makes of a client's arguments.
    if work <= _INLINE_CHARACTERS and not any(prompt.arguments for prompt in prompts):
        return list(map(encode, prompts))
    return await asyncio.to_thread(lambda: list(map(encode, prompts)))


async def read_prompts(
    spec: GenerationSpec, tokenizer: Tokenizer, max_context_len: int, max_chars_per_token: float
) -> list[tuple[TokenArray, bool]]:
    """Return the tokens of every prompt that the request wants to keep, and whether others were cut
    off; raises RequestError for a prompt without tokens, or one that no context can hold."""
    found = []
    for prompt_ids in await encode_all(
        spec.prompts,
        tokenizer,
        max_context_len,
        max_chars_per_token,
        add_special_tokens=spec.add_special_tokens,
    ):
        if len(prompt_ids) == 0:
            raise RequestError(
                "the prompt has no tokens; send text that the model's tokenizer keeps",
                param="prompt",
            )
        kept = _truncated(prompt_ids, spec, max_context_len)
        found.append((kept, len(kept) < len(prompt_ids)))
    return found


def _num_characters(prompt: Prompt) -> int:
    messages = prompt.messages or ()
    texts = [prompt.text or "", *(message["content"] for message in messages)]
    calls = (message.get("tool_calls") for message in messages)
    others = filter(None, (prompt.tools, prompt.arguments, *calls))
    return sum(map(len, texts)) + sum(map(len, map(json.dumps, others)))


def _truncated(prompt_ids: TokenArray, spec: GenerationSpec, max_context_len: int) -> TokenArray:
    """The tokens of a prompt that the request wants to keep."""
    count = spec.truncate_prompt_tokens
    if count == -1:  # as many as leave room for the output
        wanted = spec.params.max_tokens
        # An output that the whole context could not hold asks for no room of its own.
        least = max(wanted if wanted < max_context_len else 0, spec.params.min_tokens, 1)
        count = max_context_len - (0 if spec.is_prompt_only else least)
    return prompt_ids[-count:] if count > 0 else prompt_ids


def max_tokens(prompt_len: int, spec: GenerationSpec, limit: int) -> int:
    """As many of the request's max_tokens, or of the default, as fit behind the prompt.

    limit: tokens of prompt and output together, 0 = unknown.
    """
    wanted = spec.params.max_tokens
    if spec.is_prompt_only and (not limit or prompt_len <= limit):
        return 0
    if limit and prompt_len >= limit:
        raise ContextLengthError.of(
            prompt_len,
            limit,
            "reduce the length of the prompt or raise target.engine.max_context_len",
            num_output=0 if spec.is_prompt_only else 1,
        )
    if limit and prompt_len + spec.params.min_tokens > limit:
        raise RequestError.at(
            "min_tokens",
            f"{spec.params.min_tokens} and a prompt of {prompt_len} tokens exceed the "
            f"limit of {limit} tokens; send at most {limit - prompt_len}",
        )
    room = (limit or 2**31) - prompt_len
    # A request that sets min_tokens wants at least that many tokens.
    default = max(spec.default_max_tokens or room, spec.params.min_tokens)
    return min(wanted or default, room)


def stop_token_ids(spec: GenerationSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end the text: the request's, and the model's own unless it says no."""
    own = () if spec.ignore_eos else tokenizer.eos_token_ids
    return tuple(sorted({*own, *spec.params.stop_token_ids}))
