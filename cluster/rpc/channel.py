"""The client side of the data plane: connect to a worker and open a link to it.

Connecting first asks the worker for its description and refuses a peer with the wrong role, version
or vocabulary before any token is exchanged.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from cluster.client.generated import common_pb2
from cluster.errors import DrafthouseError, ProtocolError, WorkerError
from cluster.messages import PROTOCOL_VERSION, EventFrame, SubmitFrame, WorkerDescription
from cluster.rpc.codec import DESCRIPTION
from cluster.rpc.conversations import COORDINATOR, DRAFTER, TARGET, Answer, Ask, Service
from cluster.rpc.frames import MAX_FRAME_BYTES
from cluster.rpc.generated import coordinator_pb2
from cluster.rpc.options import channel_options
from cluster.rpc.status import CODE_KEY, error_of
from cluster.rpc.stream import StreamLink
from cluster.rpc.tokens import Metadata, ServiceKeys
from cluster.rpc.trust import NO_TRUST, Trust

CONNECT_TIMEOUT_S = 5.0
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
# What gRPC says of a connection that was made, but not by TLS that both sides take.
_TLS_SIGNS = ("Secure read failed", "andshake failed", "Verification Check failed", "Socket closed")
_TLS_HINT = (
    "; if one side uses data_plane.tls, both must, with certificates of one authority that are "
    "valid now and name their roles"
)


@dataclass(frozen=True, slots=True)
class Expectations:
    """The description that a worker must give of itself; "" accepts anything.

    worker_id: detects a different process that took over a dead worker's port.
    """

    worker_id: str = ""
    tokenizer_hash: str = ""


ANYTHING = Expectations()


class ClientStream:
    """The client's end of one bidirectional call (a `ByteStream`); owns the channel."""

    peer_ends = True

    def __init__(
        self, channel: grpc.aio.Channel, call: Any, address: str, sign: Callable[[str], Metadata]
    ) -> None:
        """sign: makes the metadata of further calls."""
        self.channel = channel
        self.address = address
        self.sign = sign
        self._call = call

    async def read(self) -> bytes | None:
        try:
            data = await self._call.read()
        except grpc.RpcError as error:
            raise _failure(error, self.address) from error
        except asyncio.CancelledError:
            # gRPC raises this also when the call was cancelled, not only when this task was.
            if self._call.cancelled() and not _is_cancelling():
                raise WorkerError(f"{self.address}: the stream was cancelled") from None
            raise
        return None if data is grpc.aio.EOF else bytes(data)

    async def write(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except grpc.RpcError as error:
            raise _failure(error, self.address) from error
        except asyncio.InvalidStateError as error:
            raise WorkerError(f"{self.address}: the worker has ended the stream") from error

    async def finish(self) -> None:
        try:
            await self._call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise WorkerError(f"{self.address}: the worker has ended the stream") from error

    async def dispose(self) -> None:
        self._call.cancel()
        await self.channel.close()


class CoordinatorLink(StreamLink[SubmitFrame, EventFrame]):
    """The ingress's link to a coordinator, with its metrics and status calls."""

    def __init__(self, stream: ClientStream, max_frame_bytes: int) -> None:
        super().__init__(
            stream, COORDINATOR.asks, COORDINATOR.answers, max_frame_bytes=max_frame_bytes
        )
        self._client = stream

    async def metrics(self, timeout_s: float = CONNECT_TIMEOUT_S) -> bytes:
        """The coordinator's current metrics in Prometheus' text format."""
        request, answer = coordinator_pb2.MetricsRequest(), coordinator_pb2.MetricsResponse
        return bytes((await self._ask("Metrics", request, answer, timeout_s)).text)

    async def status(self, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, Any]:
        """The coordinator's state, for operators and tools."""
        request, answer = coordinator_pb2.StatusRequest(), coordinator_pb2.StatusResponse
        status: dict[str, Any] = json.loads(
            (await self._ask("Status", request, answer, timeout_s)).json
        )
        return status

    async def watch(self) -> AsyncGenerator[tuple[str, str], None]:
        """Yield the coordinator's events, each with its name and as JSON, while it lives."""
        client, method = self._client, f"/{COORDINATOR.name}/Watch"
        request, answer = coordinator_pb2.WatchRequest(), coordinator_pb2.WatchResponse
        ask = client.channel.unary_stream(
            method, request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )  # fmt: skip
        call = ask(request, metadata=client.sign(method))
        try:
            async for told in call:
                yield told.event, told.json
        except grpc.RpcError as error:
            raise _failure(error, client.address) from error
        finally:
            call.cancel()

    async def _ask(self, name: str, request: Any, answer: Any, timeout_s: float) -> Any:
        client, method = self._client, f"/{COORDINATOR.name}/{name}"
        ask = client.channel.unary_unary(method, type(request).SerializeToString, answer.FromString)
        call = ask(request, timeout=timeout_s, metadata=client.sign(method))
        return await _answer(call, client.address)


async def connect_worker(
    service: Service[Ask, Answer],
    address: str,
    expected: Expectations = ANYTHING,
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    trust: Trust = NO_TRUST,
    name: str = "",
) -> tuple[WorkerDescription, StreamLink[Ask, Answer]]:
    """Open a link to the worker at `address` ("host:port").

    name: a drafter's in the configuration, which its key is made for.  Raises WorkerError if it
    cannot be reached in time, ProtocolError if it is not as `expected`.  Closing the link closes
    the connection.
    """
    peer = _peer(service, address, max_frame_bytes, trust, name)
    description, stream = await _connect(peer, expected, timeout_s)
    link = StreamLink(stream, service.asks, service.answers, max_frame_bytes=max_frame_bytes)
    return description, link


connect_target = functools.partial(connect_worker, TARGET)
connect_drafter = functools.partial(connect_worker, DRAFTER)


async def connect_coordinator(
    address: str,
    expected: Expectations = ANYTHING,
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    trust: Trust = NO_TRUST,
) -> tuple[WorkerDescription, CoordinatorLink]:
    """Open the ingress's link to the coordinator at `address`; see `connect_worker`."""
    peer = _peer(COORDINATOR, address, max_frame_bytes, trust)
    description, stream = await _connect(peer, expected, timeout_s)
    return description, CoordinatorLink(stream, max_frame_bytes)


def check_description(
    description: WorkerDescription, role: str, expected: Expectations, address: str
) -> None:
    """Raise ProtocolError, naming both values, if a worker is not as `expected`.

    A worker without a tokenizer hash serves any vocabulary.
    """
    version, tokenizer_hash = description.protocol_version, description.tokenizer_hash
    pairs: tuple[tuple[str, object, object], ...] = (
        ("protocol version", version, version if description.shares_protocol else PROTOCOL_VERSION),
        ("role", description.role, role),
        ("worker id", description.worker_id, expected.worker_id or description.worker_id),
        (
            "tokenizer hash",
            tokenizer_hash,
            (tokenizer_hash and expected.tokenizer_hash) or tokenizer_hash,
        ),
    )
    for what, theirs, ours in pairs:
        if theirs != ours:
            raise ProtocolError(
                f"{description.role} {description.name!r} at {address} has {what} {theirs!r}, "
                f"{ours!r} is expected; serve both sides from the same release and model",
                param=what.replace(" ", "_"),
            )


@dataclass(frozen=True, slots=True)
class _Peer:
    """A server that is to be connected to.  keys: None where it asks for no tokens."""

    service: Service[Any, Any]
    address: str
    channel: grpc.aio.Channel
    keys: ServiceKeys | None

    def sign(self, worker: str, method: str) -> Metadata:
        """Return the metadata of a call to the worker that Describe has named; "" before that."""
        return () if self.keys is None else self.keys.sign(method, worker)


def _peer(
    service: Service[Any, Any], address: str, max_frame_bytes: int, trust: Trust, name: str = ""
) -> _Peer:
    channel = trust.channel(address, service.role, channel_options(max_frame_bytes))
    return _Peer(service, address, channel, trust.keys(service.role, name))


async def _connect(
    peer: _Peer, expected: Expectations, timeout_s: float
) -> tuple[WorkerDescription, ClientStream]:
    """Call Describe, compare, open the stream; close the channel on any failure."""
    service, address, channel = peer.service, peer.address, peer.channel
    call: Any = None
    try:
        method = f"/{service.name}/Describe"
        describe = channel.unary_unary(
            method,
            common_pb2.DescribeRequest.SerializeToString,
            common_pb2.DescribeResponse.FromString,
        )
        asked = describe(
            common_pb2.DescribeRequest(), timeout=timeout_s, metadata=peer.sign("", method)
        )
        description = DESCRIPTION.decode(await _answer(asked, address))
        check_description(description, service.role, expected, address)
        sign = functools.partial(peer.sign, description.worker_id)
        method = f"/{service.name}/{service.stream}"
        call = channel.stream_stream(method)(metadata=sign(method))
        # The server sends its metadata at once, so a refused stream raises here and not later.
        async with asyncio.timeout(timeout_s):
            await call.initial_metadata()
            if call.done():
                await call.read()  # raises what the server has said, if anything
                raise WorkerError(f"{address}: the worker has ended the stream")
        return description, ClientStream(channel, call, address, sign)
    except BaseException as error:
        if call is not None:
            call.cancel()
        await channel.close()
        if isinstance(error, TimeoutError):
            raise WorkerError(f"{address}: no stream within {timeout_s:g} s") from error
        if isinstance(error, grpc.RpcError):
            raise _failure(error, address) from error
        raise


async def _answer(call: Any, address: str) -> Any:
    try:
        return await call
    except grpc.RpcError as error:
        raise _failure(error, address) from error


def _failure(error: Any, address: str) -> DrafthouseError:
    """Translate a failed call: the peer's own error, a ProtocolError if it takes us for a stranger,
    or a WorkerError if it is unreachable."""
    metadata = dict(error.trailing_metadata() or ())
    code, details = error.code(), error.details() or ""
    if CODE_KEY in metadata or code is grpc.StatusCode.UNIMPLEMENTED:
        return error_of(error, peer=address)
    if code in _REFUSED:
        return ProtocolError(f"{address} refuses the call: {details}")
    hint = _TLS_HINT if any(sign in details for sign in _TLS_SIGNS) else ""
    return WorkerError(f"{address}: {code.name}: {details}{hint}")


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
