"""The public service's calls with one answer: models, tokens of a text, text of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cluster.core import TokenArray, token_array
from cluster.errors import RequestError
from cluster.rpc.codec import read_tokens
from cluster.rpc.codec_generation import SERVICE
from cluster.rpc.generated import generation_pb2 as pb
from cluster.rpc.generation import ChatMessage, Model

# The parsers of the answers, by method.
UNARY: Mapping[str, Callable[[bytes], Any]] = {
    "ListModels": pb.ListModelsResponse.FromString,
    "Tokenize": pb.TokenizeResponse.FromString,
    "Detokenize": pb.DetokenizeResponse.FromString,
}


def path_of(method: str) -> str:
    """What gRPC calls it."""
    return f"/{SERVICE}/{method}"


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


def decode_models(message: pb.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(
        Model(model.id, model.root, model.parent, model.max_context_len) for model in message.models
    )


def encode_tokenize(
    prompt: str | Sequence[ChatMessage], model: str, *, add_special_tokens: bool
) -> pb.TokenizeRequest:
    message = pb.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.chat.SetInParent()
        for turn in prompt:
            message.chat.messages.add(role=turn.role, content=turn.content, name=turn.name)
    return message


def decode_tokenize(message: pb.TokenizeRequest) -> str | tuple[ChatMessage, ...]:
    """Its prompt; raises RequestError where there is none."""
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return message.text
    if kind == "chat":
        return tuple(
            ChatMessage(turn.role, turn.content, turn.name) for turn in message.chat.messages
        )
    raise RequestError("the prompt is absent; set text or chat", param="prompt")


def decode_tokens(message: pb.TokenizeResponse) -> TokenArray:
    return read_tokens(message.token_ids)


def encode_detokenize(token_ids: Sequence[int] | TokenArray, model: str) -> pb.DetokenizeRequest:
    """Raises RequestError for a number that is no token id."""
    try:
        return pb.DetokenizeRequest(model=model, token_ids=token_array(token_ids).tolist())
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(f"token_ids: {error}; send token ids", param="token_ids") from error
