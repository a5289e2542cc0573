"""The gRPC calls that generate nothing: models, tokens of a text, text of tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from cluster.client.generated import generation_pb2 as pb
from cluster.errors import RequestError, TooLargeError
from cluster.rpc.codec_arrays import TOKENS
from cluster.rpc.codec_generation import MODEL, decode_prompt
from cluster.rpc.generation import Model
from deployments.ingress.grpc_request import check_ids, prompt_of
from deployments.ingress.ingress import Ingress
from deployments.ingress.sampling import check_model


def read_message(kind: Any, body: Any, ingress: Ingress) -> Any:
    """The message of a body; raises RequestError for what is none."""
    if not isinstance(body, bytes):  # parsed already, by a proxy with the generated servicer
        return body
    limit = ingress.config.ingress.max_body_bytes
    if len(body) > limit:
        raise TooLargeError(
            f"the request has {len(body)} bytes, the limit is {limit}; shorten it or raise "
            "ingress.max_body_bytes"
        )
    try:
        return kind.FromString(body)
    except DecodeError:
        raise RequestError(
            f"the request is not a valid {kind.DESCRIPTOR.name}; check the encoding and that all "
            "text is UTF-8"
        ) from None


class TokenCalls:
    """Answers them by name."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress
        self._calls: Mapping[str, tuple[Any, Callable[[Any], Awaitable[Any]]]] = {
            "ListModels": (pb.ListModelsRequest, self._list_models),
            "Tokenize": (pb.TokenizeRequest, self._tokenize),
            "Detokenize": (pb.DetokenizeRequest, self._detokenize),
        }

    async def answer(self, method: str, body: Any) -> Any:
        """The answer's message.  body: the request's, parsed or not."""
        kind, call = self._calls[method]
        return await call(read_message(kind, body, self._ingress))

    async def _list_models(self, message: pb.ListModelsRequest) -> pb.ListModelsResponse:
        limits = self._ingress.limits
        most = self._ingress.coordinators.max_context_len
        models = [
            Model(
                name, limits.model_name, limits.model_name if limits.adapter_of(name) else "", most
            )
            for name in limits.model_names
        ]
        return pb.ListModelsResponse(models=map(MODEL.encode, models))

    async def _tokenize(self, message: pb.TokenizeRequest) -> pb.TokenizeResponse:
        self._check_named(message.model)
        adds = message.add_special_tokens if message.HasField("add_special_tokens") else True
        prompt = prompt_of(decode_prompt(message), self._ingress.limits)
        token_ids = await self._ingress.tokenize(prompt, add_special_tokens=adds)
        return pb.TokenizeResponse(
            token_ids=token_ids.tolist(),
            max_context_len=self._ingress.coordinators.max_context_len,
        )

    async def _detokenize(self, message: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        self._check_named(message.model)
        token_ids = TOKENS.read(message.token_ids)
        if len(token_ids) == 0:
            raise RequestError.at("token_ids", "empty; send at least one token")
        check_ids(token_ids, "token_ids", self._ingress.limits)
        return pb.DetokenizeResponse(text=await self._ingress.detokenize(token_ids))

    def _check_named(self, model: str) -> None:
        if model:
            check_model(model, self._ingress.limits)
