"""The public service's calls with one answer: models, tokens of a text, text of tokens."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.client.generated import generation_pb2 as pb
from cluster.errors import RequestError
from cluster.rpc.generation import ChatMessage, Model


def encode_models(models: Iterable[Model]) -> pb.ListModelsResponse:
    return pb.ListModelsResponse(
        models=[
            pb.Model(
                id=model.id,
                root=model.root,
                parent=model.parent,
                max_context_len=model.max_context_len,
            )
            for model in models
        ]
    )


def decode_tokenize(message: pb.TokenizeRequest) -> str | tuple[ChatMessage, ...]:
    """Its prompt; raises RequestError where there is none."""
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return message.text
    if kind == "chat":
        return tuple(
            ChatMessage(turn.role, turn.content, turn.name) for turn in message.chat.messages
        )
    raise RequestError("prompt: absent; set text or chat", param="prompt")
