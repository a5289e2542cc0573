"""The client side of the data plane: connect to a worker and open a link to it.

Connecting first asks the worker for its description and refuses a peer with the wrong role, version
or vocabulary before any token is exchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, TypeVar

import grpc

from cluster.errors import DrafthouseError, ProtocolError, WorkerError
from cluster.rpc.codec import DESCRIPTION
from cluster.rpc.conversations import COORDINATOR, DRAFTER, TARGET, Service
from cluster.rpc.frames import MAX_FRAME_BYTES
from cluster.rpc.messages import PROTOCOL_VERSION, EventFrame, SubmitFrame, WorkerDescription
from cluster.rpc.options import channel_options
from cluster.rpc.status import CODE_KEY, error_from_status
from cluster.rpc.stream import StreamLink
from cluster.rpc.trust import NO_TRUST, Trust

L = TypeVar("L")

CONNECT_TIMEOUT_S = 5.0
_REFUSED = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)
# What gRPC says of a connection that was made, but not by TLS that both sides take.
_TLS_SIGNS = ("Secure read failed", "andshake failed", "Verification Check failed", "Socket closed")
_TLS_HINT = (
    "; if one side uses data_plane.tls, both must, with certificates of one authority that are "
    "valid now and name their roles"
)


class Peer:
    """A server that is connected to: its calls, and its stream once that is open (a `ByteStream`).

    worker_id: that Describe has named, "" before that.  Owns the channel.
    """

    peer_ends = True

    def __init__(
        self,
        service: Service[Any, Any],
        address: str,
        max_frame_bytes: int,
        trust: Trust,
        name: str,
    ) -> None:
        self.service = service
        self.address = address
        self.worker_id = ""
        self._channel = trust.channel(address, service.role, channel_options(max_frame_bytes))
        self._keys = trust.keys(service.role, name)
        self._stream: Any = None

    def call(self, name: str, timeout_s: float | None = None) -> Any:
        """Begin a call beside the stream; none of them has anything to say."""
        call = self.service.call(name)
        ask = getattr(self._channel, call.kind)(
            call.method, call.request.SerializeToString, call.answer.FromString
        )
        metadata = self._keys.sign(call.method, self.worker_id)
        return ask(call.request(), timeout=timeout_s, metadata=metadata)

    async def ask(self, name: str, timeout_s: float) -> Any:
        """Return the answer of such a call."""
        with self.translated():
            return await self.call(name, timeout_s)

    async def open(self) -> None:
        """Open the stream."""
        method = f"/{self.service.name}/{self.service.stream}"
        metadata = self._keys.sign(method, self.worker_id)
        self._stream = self._channel.stream_stream(method)(metadata=metadata)
        # The server sends its metadata at once, so a refused stream raises here and not later.
        with self.translated():
            await self._stream.initial_metadata()
            if self._stream.done():
                await self._stream.read()  # raises what the server has said, if anything
                raise WorkerError(f"{self.address}: the worker has ended the stream")

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Raise our errors for those of gRPC."""
        try:
            yield
        except grpc.RpcError as error:
            raise _failure(error, self.address) from error
        except asyncio.InvalidStateError as error:
            raise WorkerError(f"{self.address}: the worker has ended the stream") from error
        except asyncio.CancelledError:
            # gRPC raises this also when the call was cancelled, not only when this task was.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise WorkerError(f"{self.address}: the call was cancelled") from None

    async def read(self) -> bytes | None:
        with self.translated():
            data = await self._stream.read()
        return None if data is grpc.aio.EOF else bytes(data)

    async def write(self, data: bytes) -> None:
        with self.translated():
            await self._stream.write(data)

    async def finish(self) -> None:
        with self.translated():
            await self._stream.done_writing()

    async def dispose(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        await self._channel.close()


class CoordinatorLink(StreamLink[SubmitFrame, EventFrame]):
    """The ingress's link to a coordinator, with its metrics and status calls."""

    _stream: Peer

    async def metrics(self, timeout_s: float = CONNECT_TIMEOUT_S) -> bytes:
        """The coordinator's current metrics in Prometheus' text format."""
        return bytes((await self._stream.ask("Metrics", timeout_s)).text)

    async def status(self, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, Any]:
        """The coordinator's state, for operators and tools."""
        return json.loads((await self._stream.ask("Status", timeout_s)).json)

    async def watch(self) -> AsyncGenerator[tuple[str, str], None]:
        """Yield the coordinator's events, each with its name and as JSON, while it lives."""
        call = self._stream.call("Watch")
        try:
            with self._stream.translated():
                async for told in call:
                    yield told.event, told.json
        finally:
            call.cancel()


def _check(
    description: WorkerDescription, role: str, worker_id: str, tokenizer_hash: str, address: str
) -> None:
    """Raise ProtocolError, naming both values, if a worker is not as expected; "" accepts any.

    A worker without a tokenizer hash serves any vocabulary.
    """
    their_hash = description.tokenizer_hash
    for what, theirs, ours in (
        (
            "protocol version",
            description.protocol_version,
            "" if description.shares_protocol else PROTOCOL_VERSION,
        ),
        ("role", description.role, role),
        ("worker id", description.worker_id, worker_id),
        ("tokenizer hash", their_hash, their_hash and tokenizer_hash),
    ):
        if ours and theirs != ours:
            raise ProtocolError(
                f"{description.role} {description.name!r} at {address} has {what} {theirs!r}, "
                f"{ours!r} is expected; serve both sides from the same release and model",
                param=what.replace(" ", "_"),
            )


async def _connect(
    kind: Callable[..., L],
    service: Service[Any, Any],
    address: str,
    *,
    worker_id: str = "",
    tokenizer_hash: str = "",
    max_frame_bytes: int = MAX_FRAME_BYTES,
    trust: Trust = NO_TRUST,
    name: str = "",
) -> tuple[WorkerDescription, L]:
    """Open a link of that kind to the worker at `address` ("host:port").

    worker_id, tokenizer_hash: those that it must describe itself with, "" = any; another id is of
    a process that took over a dead worker's port.  name: a drafter's in the configuration, which
    its key is made for.  Raises WorkerError if it cannot be reached in time, ProtocolError if it is
    not as expected.  Closing the link closes the connection.
    """
    peer = Peer(service, address, max_frame_bytes, trust, name)
    try:
        description = DESCRIPTION.decode(await peer.ask("Describe", CONNECT_TIMEOUT_S))
        _check(description, service.role, worker_id, tokenizer_hash, address)
        peer.worker_id = description.worker_id
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await peer.open()
    except BaseException as error:
        await peer.dispose()
        if isinstance(error, TimeoutError):
            raise WorkerError(f"{address}: no stream within {CONNECT_TIMEOUT_S:g} s") from error
        raise
    return description, kind(peer, service.asks, service.answers, max_frame_bytes=max_frame_bytes)


connect_target = functools.partial(_connect, StreamLink, TARGET)
connect_drafter = functools.partial(_connect, StreamLink, DRAFTER)
connect_coordinator = functools.partial(_connect, CoordinatorLink, COORDINATOR)


def _failure(error: Any, address: str) -> DrafthouseError:
    """Translate a failed call: the peer's own error, a ProtocolError if it takes us for a stranger,
    or a WorkerError if it is unreachable."""
    metadata = dict(error.trailing_metadata() or ())
    code, details = error.code(), error.details() or ""
    if CODE_KEY in metadata:
        return error_from_status(details, metadata)
    if code in _REFUSED:
        return ProtocolError(f"{address} refuses the call: {details}")
    hint = _TLS_HINT if any(sign in details for sign in _TLS_SIGNS) else ""
    return WorkerError(f"{address}: {code.name}: {details}{hint}")
