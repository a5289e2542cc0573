"""What a request's prompts and its output may be, once the prompts have tokens."""

from __future__ import annotations

from cluster.core import TokenArray
from cluster.errors import RequestError
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.spec import GenerationSpec


def truncated(prompt_ids: TokenArray, spec: GenerationSpec, max_context_len: int) -> TokenArray:
    """The tokens of a prompt that the request wants to keep."""
    count = spec.truncate_prompt_tokens
    if count == -1:  # as many as leave room for the output
        least = max(spec.params.max_tokens, spec.params.min_tokens, 1)
        count = max_context_len - (0 if spec.is_prompt_only else least)
    return prompt_ids[-count:] if count > 0 else prompt_ids


def max_tokens(prompt_len: int, spec: GenerationSpec, limit: int) -> int:
    """The request's max_tokens, which must fit, or as much of the default as fits.

    limit: tokens of prompt and output together, 0 = unknown.
    """
    wanted = spec.params.max_tokens
    if spec.is_prompt_only and (not limit or prompt_len <= limit):
        return 0
    if limit and prompt_len >= limit:
        raise RequestError(
            f"the prompt has {prompt_len} tokens, prompt and output together may have {limit}; "
            "shorten the prompt or raise target.engine.max_context_len",
            param="prompt",
        )
    if limit and prompt_len + wanted > limit:
        raise RequestError(
            f"{spec.max_tokens_name}: {wanted} and a prompt of {prompt_len} tokens exceed the "
            f"limit of {limit} tokens; send at most {limit - prompt_len}",
            param=spec.max_tokens_name,
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
    return wanted or min(default, room)


def stop_token_ids(spec: GenerationSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end the text: the request's, and the model's own unless it says no."""
    own = () if spec.ignore_eos else tokenizer.eos_token_ids
    return tuple(sorted({*own, *spec.params.stop_token_ids}))
