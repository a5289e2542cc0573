"""What a model is asked: a prompt in one of its three forms, and how the answer to it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from cluster.core import TokenArray
from cluster.records import frozen, record
from cluster.requests.fields import GrammarSpec
from cluster.text.tokenizer import Tokenizer

Message = Mapping[str, Any]  # as chat templates read them; content is a text, "" for none
PlacedMessages = list[tuple[str, Message]]  # each with its place in the body
# The grammar that holds an answer, and the field that it comes from.
Held = tuple[GrammarSpec, str]


@frozen
class ChatUse:
    """held: what the calls are held to, None = they are not; it comes from the form that the text
    has, where it allows one in place of calls.

    reads_calls: whether calls are looked for in the answer.  is_forced: whether it must be calls.
    is_parallel: whether it may have several.  shows_reasoning: whether it is sent.
    custom: names of tools whose calls are one text each.
    """

    held: Held | None = None
    reads_calls: bool = False
    is_forced: bool = False
    is_parallel: bool = True
    shows_reasoning: bool = True
    custom: frozenset[str] = frozenset()


@record
class Prompt:
    """Exactly one of: a text to tokenise, token ids, or the messages of a conversation.

    tools: for the template of a conversation.  arguments: what else it is given.
    use: how the answer is read; None = as plain text.
    names: what the body that has it calls what an error may name, by the names of chats.
    """

    text: str | None = None
    token_ids: TokenArray | None = None
    messages: tuple[Message, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    use: ChatUse | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_characters(self) -> int:
        """Of its text, or of all that a template is given but earlier reasoning, which many leave
        out."""
        messages = self.messages or ()
        texts = [self.text or "", *(message["content"] for message in messages)]
        calls = (message.get("tool_calls") for message in messages)
        others = filter(None, (self.tools, self.arguments, *calls))
        return sum(map(len, texts)) + sum(map(len, map(json.dumps, others)))

    def encode(self, tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> TokenArray:
        """Its tokens.  add_special_tokens: the model's own, around a text.  Raises RequestError
        for messages that the model's template does not take."""
        if self.token_ids is not None:
            return self.token_ids
        if self.messages is None:
            return tokenizer.encode(self.text or "", add_special_tokens=add_special_tokens)
        return tokenizer.apply_chat_template(
            self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            template_arguments=self.arguments,
        )
