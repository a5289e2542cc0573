"""The bodies of /tokenize and /detokenize, which are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from cluster.core import TokenArray
from cluster.errors import RequestError
from deployments.ingress.api.contract import REQUIRED, Body, Endpoint, instead, supported
from deployments.ingress.chat import OF_MESSAGES, Conversation, Turns
from deployments.ingress.fields import OF_CHATS
from deployments.ingress.openai_request import TOKENS, token_ids_of
from deployments.ingress.sampling import OF_MODEL, ModelName
from deployments.ingress.spec import Limits, Prompt
from deployments.ingress.tools import ToolUse


class _MayName(Body):
    """As in vLLM the model may be left out: there is one tokenizer."""

    model: ModelName | None = supported(OF_MODEL)


class Tokenize(_MayName, Conversation, ToolUse):
    hidden = ToolUse.all_but("tools")

    text: str | None = supported("a text; this or messages", alias="prompt")
    messages: Turns = supported(OF_MESSAGES, ())
    add_special_tokens: bool = supported("whether a text gets the model's own", True)
    return_token_strs: bool = supported("each token as the vocabulary names it", False)

    def check(self, limits: Limits) -> None:
        super().check(limits)
        if (self.text is None) == (not self.messages):
            raise RequestError.at("prompt", "send either prompt or messages")


class Detokenize(_MayName):
    tokens: Annotated[TokenArray, instead(token_ids_of, TOKENS)] = supported(
        "special ones have text too", REQUIRED
    )


@dataclass(frozen=True, slots=True, eq=False)
class TokenizeRequest:
    """return_token_strs: whether the answer names each token as the vocabulary does."""

    prompt: Prompt
    add_special_tokens: bool
    return_token_strs: bool
    ignored: tuple[str, ...]


def parse_tokenize(values: Mapping[str, Any], limits: Limits) -> TokenizeRequest:
    """Parse the body of POST /tokenize: `prompt` or `messages`."""
    asked = Tokenize.read(values, limits)
    use = asked.use(limits.dialect)
    prompt = asked.prompt(use, OF_CHATS) if asked.text is None else Prompt(text=asked.text)
    return TokenizeRequest(prompt, asked.add_special_tokens, asked.return_token_strs, asked.ignored)


def parse_detokenize(values: Mapping[str, Any], limits: Limits) -> TokenArray:
    """Parse the body of POST /detokenize."""
    return Detokenize.read(values, limits).tokens


TOKENIZE = Endpoint("/tokenize", "The tokens of a text or of a conversation", Tokenize)
DETOKENIZE = Endpoint("/detokenize", "The text of tokens", Detokenize)
