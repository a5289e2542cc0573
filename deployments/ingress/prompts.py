"""Tokenises prompts, after a length check and without blocking the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from cluster.core import TokenArray
from cluster.errors import RequestError
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.spec import Message, Prompt

# Encoding this much text takes about two milliseconds; more is encoded in another thread.
_INLINE_CHARACTERS = 8192
# The fixed cost of a message, as a number of characters that are encoded in the same time.
_MESSAGE_CHARACTERS = 64


def check_lengths(
    prompts: Sequence[Prompt], max_context_len: int, max_chars_per_token: float
) -> None:
    """Refuse text that is too long for the context, before tokenising it.

    max_context_len: tokens, 0 = unknown.
    """
    limit = int(max_context_len * max_chars_per_token)
    for prompt in prompts:
        count = _num_characters(prompt)
        if limit and count > limit:
            param = "prompt" if prompt.messages is None else "messages"
            raise RequestError.at(
                param,
                f"{count} characters; the limit is {limit}, for {max_context_len} tokens "
                "of prompt and output at ingress.max_chars_per_token; shorten the prompt",
            )


async def encode_all(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, *, add_special_tokens: bool
) -> list[TokenArray]:
    """The token ids of every prompt; encoded in another thread if they are long together."""

    def encode(prompt: Prompt) -> TokenArray:
        if prompt.token_ids is not None:
            return prompt.token_ids
        if prompt.messages is not None:
            options = prompt.template
            return tokenizer.apply_chat_template(
                prompt.messages,
                tools=prompt.tools,
                add_generation_prompt=options.add_generation_prompt,
                template_arguments={
                    **options.arguments,
                    **({"continue_final_message": True} if options.continue_final_message else {}),
                },
            )
        return tokenizer.encode(prompt.text or "", add_special_tokens=add_special_tokens)

    num_messages = sum(len(prompt.messages or ()) for prompt in prompts)
    work = sum(map(_num_characters, prompts)) + _MESSAGE_CHARACTERS * num_messages
    if work <= _INLINE_CHARACTERS:
        return list(map(encode, prompts))
    return await asyncio.to_thread(lambda: list(map(encode, prompts)))


def _num_characters(prompt: Prompt) -> int:
    if prompt.messages is not None:
        tools = len(json.dumps(prompt.tools)) if prompt.tools else 0
        return tools + sum(map(_message_characters, prompt.messages))
    return len(prompt.text or "")


def _message_characters(message: Message) -> int:
    calls = message.get("tool_calls")
    return len(message["content"] or "") + (len(json.dumps(calls)) if calls else 0)
