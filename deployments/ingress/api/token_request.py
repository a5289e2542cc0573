"""The bodies of /tokenize and /detokenize, which are vLLM's."""

from __future__ import annotations

from typing import Annotated

from cluster.core import TokenArray
from cluster.errors import RequestError
from cluster.requests.grammar_spec import GrammarSpec
from deployments.ingress.api.contract import REQUIRED, Body, Endpoint, instead, supported
from deployments.ingress.chat import OF_MESSAGES, Conversation, Turns
from deployments.ingress.openai_request import TOKENS, token_ids_of
from deployments.ingress.sampling import OF_MODEL, ModelName
from deployments.ingress.spec import ChatUse, Limits, Prompt
from deployments.ingress.tools import ToolUse


class _MayName(Body):
    """As in vLLM the model may be left out: there is one tokenizer."""

    model: ModelName | None = supported(OF_MODEL)


class Tokenize(_MayName, Conversation):
    hidden = ToolUse.all_but("tools")

    text: str | None = supported("a text; this or messages", alias="prompt")
    messages: Turns = supported(OF_MESSAGES, ())
    add_special_tokens: bool = supported("whether a text gets the model's own", True)
    return_token_strs: bool = supported("each token as the vocabulary names it", False)

    def check(self, limits: Limits) -> None:
        super().check(limits)
        if (self.text is None) == (not self.messages):
            raise RequestError.at("prompt", "send either prompt or messages")

    def prompt_of(self, limits: Limits, form: GrammarSpec | None = None) -> tuple[Prompt, ChatUse]:
        if self.text is None:
            return super().prompt_of(limits, form)
        return Prompt(text=self.text), ChatUse()


class Detokenize(_MayName):
    tokens: Annotated[TokenArray, instead(token_ids_of, TOKENS)] = supported(
        "special ones have text too", REQUIRED
    )


TOKENIZE = Endpoint("/tokenize", "The tokens of a text or of a conversation", Tokenize)
DETOKENIZE = Endpoint("/detokenize", "The text of tokens", Detokenize)
