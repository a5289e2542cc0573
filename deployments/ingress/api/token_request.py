"""Parses the bodies of /tokenize and /detokenize, which are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.core import TokenArray
from cluster.errors import RequestError
from deployments.ingress.api.table import DETOKENIZE, TOKENIZE
from deployments.ingress.chat import parse_messages, parse_template
from deployments.ingress.fields import Fields, encodable, json_kind
from deployments.ingress.names import OF_CHATS
from deployments.ingress.openai_request import check_model, token_ids_of
from deployments.ingress.spec import Limits, Prompt
from deployments.ingress.tools import read_chat_use


@dataclass(frozen=True, slots=True, eq=False)
class TokenizeRequest:
    """return_token_strs: whether the answer names each token as the vocabulary does."""

    prompt: Prompt
    add_special_tokens: bool
    return_token_strs: bool
    ignored: tuple[str, ...]


def parse_tokenize(values: Mapping[str, Any], limits: Limits) -> TokenizeRequest:
    """Parse the body of POST /tokenize: `prompt` or `messages`."""
    opened = TOKENIZE.open(values, limits.compatibility)
    fields = Fields(values)
    _check_named(fields, limits)
    use = read_chat_use(fields, limits.dialect)
    template = parse_template(fields, use.template_arguments or {})
    text, messages = fields.get("prompt"), fields.get("messages")
    if (text is None) == (messages is None):
        raise RequestError.at("prompt", "send either prompt or messages")
    if messages is not None:
        prompt = Prompt(
            messages=parse_messages(messages), tools=use.tools, template=template, names=OF_CHATS
        )
    elif isinstance(text, str):
        prompt = Prompt(text=encodable(text, "prompt"))
    else:
        raise RequestError.at("prompt", f"{json_kind(text)}; send a string")
    return TokenizeRequest(
        prompt,
        fields.boolean("add_special_tokens", default=True),
        fields.boolean("return_token_strs", default=False),
        tuple(opened.ignored),
    )


def parse_detokenize(values: Mapping[str, Any], limits: Limits) -> TokenArray:
    """Parse the body of POST /detokenize."""
    DETOKENIZE.open(values, limits.compatibility)
    fields = Fields(values)
    _check_named(fields, limits)
    tokens = fields.get("tokens")
    if not isinstance(tokens, list):
        raise RequestError.at("tokens", f"{json_kind(tokens)}; send a list of token ids")
    return token_ids_of(tokens, limits, "tokens")


def _check_named(fields: Fields, limits: Limits) -> None:
    """As in vLLM the model may be left out: there is one tokenizer."""
    if fields.get("model") is not None:
        check_model(fields.string("model", ""), limits)
