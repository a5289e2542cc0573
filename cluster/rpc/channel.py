"""The client side of the data plane: connect to a worker and open a link to it.

Connecting first asks the worker for its description and refuses a peer with the wrong role, version
or vocabulary before any token is exchanged.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import grpc

from cluster.client.generated import common_pb2
from cluster.errors import DrafthouseError, ProtocolError, WorkerError
from cluster.messages import (
    PROTOCOL_VERSION,
    CommitFrame,
    EventFrame,
    ProposalFrame,
    StepFrame,
    SubmitFrame,
    VerdictFrame,
    WorkerDescription,
)
from cluster.rpc.codec import DESCRIPTION
from cluster.rpc.conversations import (
    ASK_COORDINATOR,
    ASK_DRAFTER,
    ASK_TARGET,
    COORDINATOR,
    DRAFTER,
    TARGET,
    Service,
)
from cluster.rpc.frames import MAX_FRAME_BYTES
from cluster.rpc.generated import coordinator_pb2
from cluster.rpc.link import Link
from cluster.rpc.options import channel_options
from cluster.rpc.status import CODE_KEY, error_of
from cluster.rpc.stream import StreamLink

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Expectations:
    """The description that a worker must give of itself; "" and 0 accept anything.

    worker_id: detects a different process that took over a dead worker's port.
    """

    worker_id: str = ""
    tokenizer_hash: str = ""
    vocab_size: int = 0


ANYTHING = Expectations()


class ClientStream:
    """The client's end of one bidirectional call (a `ByteStream`); owns the channel."""

    peer_ends = True

    def __init__(self, channel: grpc.aio.Channel, call: Any, address: str) -> None:
        self.channel = channel
        self.address = address
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
        super().__init__(stream, ASK_COORDINATOR, max_frame_bytes=max_frame_bytes)
        self._client = stream

    async def metrics(self, timeout_s: float = CONNECT_TIMEOUT_S) -> bytes:
        """The coordinator's current metrics in Prometheus' text format."""
        ask = self._client.channel.unary_unary(
            f"/{COORDINATOR.name}/Metrics",
            coordinator_pb2.MetricsRequest.SerializeToString,
            coordinator_pb2.MetricsResponse.FromString,
        )
        call = ask(coordinator_pb2.MetricsRequest(), timeout=timeout_s)
        return bytes((await _answer(call, self._client.address)).text)

    async def status(self, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, Any]:
        """The coordinator's state, for operators and tools."""
        ask = self._client.channel.unary_unary(
            f"/{COORDINATOR.name}/Status",
            coordinator_pb2.StatusRequest.SerializeToString,
            coordinator_pb2.StatusResponse.FromString,
        )
        call = ask(coordinator_pb2.StatusRequest(), timeout=timeout_s)
        status: dict[str, Any] = json.loads((await _answer(call, self._client.address)).json)
        return status


async def connect_target(
    address: str,
    expected: Expectations = ANYTHING,
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> tuple[WorkerDescription, Link[StepFrame, VerdictFrame]]:
    """Open a link to the target at `address` ("host:port").

    Raises WorkerError if it cannot be reached in time, ProtocolError if it is not as `expected`.
    Closing the link closes the connection.
    """
    channel = _open_channel(address, max_frame_bytes)
    description, stream = await _connect(channel, address, TARGET, expected, timeout_s)
    return description, StreamLink(stream, ASK_TARGET, max_frame_bytes=max_frame_bytes)


async def connect_drafter(
    address: str,
    expected: Expectations = ANYTHING,
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> tuple[WorkerDescription, Link[CommitFrame, ProposalFrame]]:
    """Open a link to the drafter at `address`; errors as in `connect_target`."""
    channel = _open_channel(address, max_frame_bytes)
    description, stream = await _connect(channel, address, DRAFTER, expected, timeout_s)
    return description, StreamLink(stream, ASK_DRAFTER, max_frame_bytes=max_frame_bytes)


async def connect_coordinator(
    address: str,
    expected: Expectations = ANYTHING,
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> tuple[WorkerDescription, CoordinatorLink]:
    """Open the ingress's link to the coordinator at `address`; errors as in `connect_target`."""
    channel = _open_channel(address, max_frame_bytes)
    description, stream = await _connect(channel, address, COORDINATOR, expected, timeout_s)
    return description, CoordinatorLink(stream, max_frame_bytes)


def check_description(
    description: WorkerDescription, role: str, expected: Expectations, address: str
) -> None:
    """Raise ProtocolError, naming both values, if a worker is not as `expected`.

    A worker without a tokenizer hash or vocabulary size serves any vocabulary.
    """
    pairs: tuple[tuple[str, object, object], ...] = (
        ("protocol version", description.protocol_version, PROTOCOL_VERSION),
        ("role", description.role, role),
        ("worker id", description.worker_id, expected.worker_id),
        ("tokenizer hash", description.tokenizer_hash, expected.tokenizer_hash),
        ("vocabulary size", description.vocab_size, expected.vocab_size),
    )
    for what, theirs, ours in pairs:
        is_fixed = what in ("protocol version", "role")
        is_open = not ours or (not theirs and what != "worker id")
        if theirs != ours and (is_fixed or not is_open):
            raise ProtocolError(
                f"{description.role} {description.name!r} at {address} has {what} {theirs!r}, "
                f"{ours!r} is expected; serve both sides from the same release and model",
                param=what.replace(" ", "_"),
            )


def _open_channel(address: str, max_frame_bytes: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=channel_options(max_frame_bytes))


async def _connect(
    channel: grpc.aio.Channel,
    address: str,
    service: Service,
    expected: Expectations,
    timeout_s: float,
) -> tuple[WorkerDescription, ClientStream]:
    """Call Describe, compare, open the stream; close the channel on any failure."""
    call: Any = None
    try:
        describe = channel.unary_unary(
            f"/{service.name}/Describe",
            common_pb2.DescribeRequest.SerializeToString,
            common_pb2.DescribeResponse.FromString,
        )
        answer = await _answer(describe(common_pb2.DescribeRequest(), timeout=timeout_s), address)
        description = DESCRIPTION.decode(answer)
        check_description(description, service.role, expected, address)
        call = channel.stream_stream(f"/{service.name}/{service.stream}")()
        # The server sends its metadata at once, so a refused stream raises here and not later.
        async with asyncio.timeout(timeout_s):
            await call.initial_metadata()
            if call.done():
                raise WorkerError(f"{address}: the worker has ended the stream")
        return description, ClientStream(channel, call, address)
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
    """Translate a failed call: the peer's own error, or a WorkerError if it is unreachable."""
    metadata = dict(error.trailing_metadata() or ())
    if CODE_KEY in metadata or error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return error_of(error, peer=address)
    return WorkerError(f"{address}: {error.code().name}: {error.details()}")


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
