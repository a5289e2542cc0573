"""The client's end of the public Generation service, blocking and asyncio.

Both raise only DrafthouseErrors, whatever gRPC reports.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from cluster.errors import ConfigError
from cluster.rpc.codec_generation import decode_response, encode_request
from cluster.rpc.codec_tokens import UNARY, path_of
from cluster.rpc.generated import generation_pb2
from cluster.rpc.generation import GenerationRequest, GenerationResponse
from cluster.rpc.options import public_channel_options
from cluster.rpc.status import error_of

_METHOD = path_of("Generate")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and how to reach the service.

    address: "host:port".  tls: encrypt, using root_certificates (PEM) or the system's.
    metadata: sent with every call, e.g. an authorization header or Serve's `application`.
    """

    address: str
    tls: bool = False
    root_certificates: bytes | None = None
    metadata: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        if self.root_certificates is not None and not self.tls:
            raise ConfigError("root_certificates are given but tls is off; set tls=True")


class GenerationChannel:
    """A blocking connection, safe to use from several threads."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Connects when first used."""
        self._endpoint = endpoint
        options = public_channel_options()
        if endpoint.tls:
            credentials = grpc.ssl_channel_credentials(endpoint.root_certificates)
            self._channel = grpc.secure_channel(endpoint.address, credentials, options)
        else:
            self._channel = grpc.insecure_channel(endpoint.address, options)
        self._generate = self._channel.unary_stream(
            _METHOD,
            generation_pb2.GenerateRequest.SerializeToString,
            generation_pb2.GenerateResponse.FromString,
        )

    def generate(
        self, request: GenerationRequest, timeout_s: float | None = None
    ) -> Generator[GenerationResponse]:
        """One stream; leaving the iteration cancels it."""
        call = self._generate(
            encode_request(request), timeout=timeout_s, metadata=tuple(self._endpoint.metadata)
        )
        try:
            for message in call:
                yield decode_response(message)
        except grpc.RpcError as error:
            raise error_of(error, peer=self._endpoint.address) from error
        finally:
            call.cancel()

    def call(self, method: str, message: Any, timeout_s: float | None = None) -> Any:
        """One of the calls with one answer, by name: its message."""
        try:
            return self._channel.unary_unary(
                path_of(method), type(message).SerializeToString, UNARY[method]
            )(message, timeout=timeout_s, metadata=tuple(self._endpoint.metadata))
        except grpc.RpcError as error:
            raise error_of(error, peer=self._endpoint.address) from error

    def close(self) -> None:
        """Close the connection; streams in progress end with an error."""
        self._channel.close()


class AsyncGenerationChannel:
    """An asyncio connection; use it on the event loop that created it."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Connects when first used."""
        self._endpoint = endpoint
        options = public_channel_options()
        if endpoint.tls:
            credentials = grpc.ssl_channel_credentials(endpoint.root_certificates)
            self._channel = grpc.aio.secure_channel(endpoint.address, credentials, options)
        else:
            self._channel = grpc.aio.insecure_channel(endpoint.address, options)
        self._generate: Any = self._channel.unary_stream(
            _METHOD,
            generation_pb2.GenerateRequest.SerializeToString,
            generation_pb2.GenerateResponse.FromString,
        )

    async def generate(
        self, request: GenerationRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerationResponse]:
        """One stream; leaving the iteration cancels it."""
        call = self._generate(
            encode_request(request), timeout=timeout_s, metadata=tuple(self._endpoint.metadata)
        )
        try:
            async for message in call:
                yield decode_response(message)
        except grpc.RpcError as error:
            raise error_of(error, peer=self._endpoint.address) from error
        finally:
            call.cancel()

    async def call(self, method: str, message: Any, timeout_s: float | None = None) -> Any:
        """One of the calls with one answer, by name: its message."""
        ask: Any = self._channel.unary_unary(
            path_of(method), type(message).SerializeToString, UNARY[method]
        )
        try:
            return await ask(message, timeout=timeout_s, metadata=tuple(self._endpoint.metadata))
        except grpc.RpcError as error:
            raise error_of(error, peer=self._endpoint.address) from error

    async def close(self) -> None:
        """Close the connection; streams in progress end with an error."""
        await self._channel.close()
