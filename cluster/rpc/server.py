"""The server side of the data plane: a gRPC server around one worker.

Each server also answers `grpc.health.v1.Health/Check`, so probes work directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc

from cluster.client.generated import common_pb2
from cluster.errors import ConfigError, DrafthouseError, WorkerError
from cluster.messages import (
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
    ANSWER_AS_COORDINATOR,
    ANSWER_AS_DRAFTER,
    ANSWER_AS_TARGET,
    COORDINATOR,
    DRAFTER,
    TARGET,
    Service,
)
from cluster.rpc.frames import MAX_FRAME_BYTES
from cluster.rpc.generated import coordinator_pb2
from cluster.rpc.guard import Guard, health_handler
from cluster.rpc.link import Link
from cluster.rpc.options import MAX_CALLS, server_options
from cluster.rpc.status import abort
from cluster.rpc.stream import Conversation, StreamLink
from cluster.rpc.tokens import TokenCheck
from cluster.rpc.trust import NO_TRUST, Trust

log = logging.getLogger(__name__)

# How long a worker may take to free a stream's state after its peer has gone.
_CLEANUP_GRACE_S = 5.0


Answer = TypeVar("Answer", covariant=True)
Ask = TypeVar("Ask", contravariant=True)


class Serves(Protocol[Answer, Ask]):
    """A worker's interface to the server.  serve returns when its link has ended."""

    def describe(self) -> WorkerDescription: ...

    async def serve(self, link: Link[Answer, Ask]) -> None: ...


class ServesCoordinator(Serves[EventFrame, SubmitFrame], Protocol):
    """The coordinator's interface to the server."""

    def render_metrics(self) -> bytes: ...

    def status(self) -> Mapping[str, Any]: ...

    def watch(self) -> AsyncGenerator[tuple[str, str], None]: ...


class RunningServer:
    """A listening server.  port: the bound port.  address: "host:port" as bound."""

    def __init__(self, server: grpc.aio.Server, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._server = server

    @property
    def address(self) -> str:
        """The address at which clients on the same network reach the server."""
        return f"{self.host}:{self.port}"

    async def stop(self, grace_s: float = 1.0) -> None:
        """Refuse new streams, give open ones grace_s seconds to end, then break them."""
        await self._server.stop(grace_s)


async def serve_target(
    worker: Serves[VerdictFrame, StepFrame],
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    trust: Trust = NO_TRUST,
) -> RunningServer:
    """Serve a target; port 0 = a free port.

    Raises ConfigError if the port is taken, or open to strangers and without any `trust`."""
    place = _Place(host, port, max_frame_bytes, trust)
    return await _start(TARGET, worker, _methods(worker, TARGET, ANSWER_AS_TARGET, place), place)


async def serve_drafter(
    worker: Serves[ProposalFrame, CommitFrame],
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    trust: Trust = NO_TRUST,
) -> RunningServer:
    """Serve a drafter; see `serve_target`."""
    place = _Place(host, port, max_frame_bytes, trust)
    return await _start(DRAFTER, worker, _methods(worker, DRAFTER, ANSWER_AS_DRAFTER, place), place)


async def serve_coordinator(
    coordinator: ServesCoordinator,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    trust: Trust = NO_TRUST,
) -> RunningServer:
    """Serve a coordinator; see `serve_target`."""
    place = _Place(host, port, max_frame_bytes, trust)

    async def metrics(_request: Any, _context: Any) -> Any:
        return coordinator_pb2.MetricsResponse(text=coordinator.render_metrics())

    async def status(_request: Any, _context: Any) -> Any:
        return coordinator_pb2.StatusResponse(json=json.dumps(coordinator.status()))

    async def watch(_request: Any, context: Any) -> None:
        # At once, though nothing may happen for a while.
        await context.send_initial_metadata(())
        async with contextlib.aclosing(coordinator.watch()) as events:
            async for event, told in events:
                await context.write(coordinator_pb2.WatchResponse(event=event, json=told))

    methods = _methods(coordinator, COORDINATOR, ANSWER_AS_COORDINATOR, place)
    methods["Metrics"] = grpc.unary_unary_rpc_method_handler(
        metrics,
        coordinator_pb2.MetricsRequest.FromString,
        coordinator_pb2.MetricsResponse.SerializeToString,
    )
    methods["Status"] = grpc.unary_unary_rpc_method_handler(
        status,
        coordinator_pb2.StatusRequest.FromString,
        coordinator_pb2.StatusResponse.SerializeToString,
    )
    methods["Watch"] = grpc.unary_stream_rpc_method_handler(
        watch,
        coordinator_pb2.WatchRequest.FromString,
        coordinator_pb2.WatchResponse.SerializeToString,
    )
    return await _start(COORDINATOR, coordinator, methods, place)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a server listens, and for whom."""

    host: str
    port: int
    max_frame_bytes: int
    trust: Trust


class ServerStream:
    """The server's end of one bidirectional call (a `ByteStream`)."""

    peer_ends = False

    def __init__(self, context: Any) -> None:
        self._context = context

    async def read(self) -> bytes | None:
        try:
            data = await self._context.read()
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise WorkerError(f"the peer's stream broke: {error}") from error
        if data is grpc.aio.EOF:
            # A vanished client's end of stream may arrive before its cancellation.  It then looks
            # like a clean end, after which the worker frees the same state.
            if self._context.cancelled():
                raise WorkerError("the peer has gone")
            return None
        return bytes(data)

    async def write(self, data: bytes) -> None:
        try:
            await self._context.write(data)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise WorkerError(f"the peer's stream broke: {error}") from error

    async def finish(self) -> None:
        """Nothing to do: the call ends when its handler returns."""

    async def dispose(self) -> None:
        """Nothing to do: the handler owns the call."""


def _methods(
    worker: Any, service: Service, conversation: Conversation[Any, Any], place: _Place
) -> dict[str, Any]:
    async def describe(_request: Any, _context: Any) -> Any:
        return DESCRIPTION.encode(worker.describe())

    async def converse(_requests: Any, context: Any) -> None:
        await context.send_initial_metadata(())
        link: StreamLink[Any, Any] = StreamLink(
            ServerStream(context), conversation, max_frame_bytes=place.max_frame_bytes
        )
        await _serve_link(worker.serve, link, context)

    return {
        "Describe": grpc.unary_unary_rpc_method_handler(
            describe,
            common_pb2.DescribeRequest.FromString,
            common_pb2.DescribeResponse.SerializeToString,
        ),
        # Raw bytes, so that our codec decides how to treat a malformed frame.
        service.stream: grpc.stream_stream_rpc_method_handler(converse),
    }


async def _serve_link(
    serve: Callable[[Link[Any, Any]], Awaitable[None]],
    link: StreamLink[Any, Any],
    context: Any,
) -> None:
    """Run the worker on the link until either ends; the worker always gets time to clean up."""
    serving = asyncio.ensure_future(serve(link))
    ended = asyncio.ensure_future(link.wait_ended())
    try:
        await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({serving}, timeout=_CLEANUP_GRACE_S)
    except asyncio.CancelledError:
        # The peer has gone or the server stops; the worker sees a broken link in both cases.
        link.fail(WorkerError("the peer has gone"))
        await asyncio.wait({serving}, timeout=_CLEANUP_GRACE_S)
        raise
    finally:
        for task in (serving, ended):
            task.cancel()
        await asyncio.wait({serving, ended})
        await link.close()
    await _report_failure(serving, context)


async def _report_failure(serving: asyncio.Future[None], context: Any) -> None:
    if serving.cancelled():
        return
    error = serving.exception()
    if isinstance(error, DrafthouseError):
        await abort(context, error)
    elif error is not None:
        log.error("worker failed on a stream", exc_info=error)
        await abort(context, WorkerError(f"the worker failed: {type(error).__name__}"))


async def _start(
    service: Service, worker: Serves[Any, Any], methods: dict[str, Any], place: _Place
) -> RunningServer:
    host, port = place.host, place.port
    place.trust.check_at(host)
    server = grpc.aio.server(
        interceptors=[_guard(service, worker.describe(), place.trust)],
        options=server_options(place.max_frame_bytes),
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    handler = grpc.method_handlers_generic_handler(service.name, methods)
    server.add_generic_rpc_handlers((handler, health_handler()))
    try:
        bound = place.trust.listen(server, f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(
            f"port {port} of {host} cannot be bound; choose another one, or 0 for a free one",
            param="port",
        ) from error
    await server.start()
    log.info("serving service=%s host=%s port=%d", service.name, host, bound)
    return RunningServer(server, host, bound)


def _guard(service: Service, description: WorkerDescription, trust: Trust) -> Guard:
    keys = trust.keys(service.role, description.name)
    if keys is not None and not keys.get():
        raise ConfigError.at("data_plane.secret_file", f"it holds no key of {keys.service}")
    tokens = None if keys is None else TokenCheck(keys, description.worker_id)
    return Guard(tokens, service.caller if trust.pem is not None else "")
