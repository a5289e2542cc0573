"""The server side of the data plane: a gRPC server around one worker.

Each server also answers `grpc.health.v1.Health/Check`, so probes work directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

import grpc

from cluster.config.doors import joined
from cluster.errors import ConfigError, DrafthouseError, WorkerError
from cluster.options import port
from cluster.rpc.codec import DESCRIPTION
from cluster.rpc.conversations import COORDINATOR, SERVICES, Answer, Ask, Service
from cluster.rpc.frames import MAX_FRAME_BYTES
from cluster.rpc.generated import coordinator_pb2
from cluster.rpc.link import Link, end_tasks
from cluster.rpc.messages import WorkerDescription
from cluster.rpc.options import MAX_CALLS, server_options
from cluster.rpc.status import abort
from cluster.rpc.stream import StreamLink
from cluster.rpc.tokens import TokenCheck
from cluster.rpc.trust import NO_TRUST, Guard, Trust, health_handler

log = logging.getLogger(__name__)

# How long a worker may take to free a stream's state after its peer has gone.
_CLEANUP_GRACE_S = 5.0


class Serves(Protocol[Answer, Ask]):
    """A worker's interface to the server.  serve returns when its link has ended."""

    def describe(self) -> WorkerDescription: ...

    async def serve(self, link: Link[Answer, Ask]) -> None: ...


class RunningServer:
    """A listening server.  port: the bound one.  address: "host:port" as bound, where clients on
    the same network reach it."""

    def __init__(self, server: grpc.aio.Server, host: str, port: int) -> None:
        self.address, self.port = joined(host, port), port
        self._server = server

    async def stop(self, grace_s: float = 1.0) -> None:
        """Refuse new streams, give open ones grace_s seconds to end, then break them.

        By then their last frames have arrived; more is not waited for, because every peer can
        continue elsewhere."""
        await self._server.stop(grace_s)


async def serve_worker(
    worker: Serves[Answer, Ask],
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    service: Service[Ask, Answer] | None = None,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    trust: Trust = NO_TRUST,
) -> RunningServer:
    """Serve a worker; port 0 = a free port.  service: None = that of the role that it describes.

    Raises ConfigError if the port is taken, or open to strangers and without any `trust`."""
    description = worker.describe()
    service = service or SERVICES[description.role]
    methods = _methods(worker, service, max_frame_bytes)
    trust.check_at(host)
    server = grpc.aio.server(
        interceptors=[_guard(service, description, trust)],
        options=server_options(max_frame_bytes),
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    handler = grpc.method_handlers_generic_handler(service.name, methods)
    server.add_generic_rpc_handlers((handler, health_handler()))
    try:
        bound = trust.listen(server, joined(host, port))
    except RuntimeError as error:
        raise ConfigError(
            f"port {port} of {host} cannot be bound; choose another one, or 0 for a free one",
            param="port",
        ) from error
    await server.start()
    log.info("serving service=%s host=%s port=%d", service.name, host, bound)
    return RunningServer(server, host, bound)


def _reports(coordinator: Any) -> dict[str, Any]:
    """The calls of a coordinator beside its stream: render_metrics, status, and watch."""

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

    return {"Metrics": metrics, "Status": status, "Watch": watch}


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    try:
        yield
    except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        raise WorkerError(f"the peer's stream broke: {error}") from error


class ServerStream:
    """The server's end of one bidirectional call (a `ByteStream`)."""

    peer_ends = False

    def __init__(self, context: Any) -> None:
        self._context = context

    async def read(self) -> bytes | None:
        with _broken():
            data = await self._context.read()
        if data is grpc.aio.EOF:
            # A vanished client's end of stream may arrive before its cancellation.  It then looks
            # like a clean end, after which the worker frees the same state.
            if self._context.cancelled():
                raise WorkerError("the peer has gone")
            return None
        return bytes(data)

    async def write(self, data: bytes) -> None:
        with _broken():
            await self._context.write(data)

    async def finish(self) -> None:
        """Nothing to do: the call ends when its handler returns."""

    async def dispose(self) -> None:
        """Nothing to do: the handler owns the call."""


def _methods(
    worker: Serves[Answer, Ask], service: Service[Ask, Answer], max_frame_bytes: int
) -> dict[str, Any]:
    async def describe(_request: Any, _context: Any) -> Any:
        return DESCRIPTION.encode(worker.describe())

    async def converse(_requests: Any, context: Any) -> None:
        await context.send_initial_metadata(())
        link = StreamLink(
            ServerStream(context),
            service.answers,
            service.asks,
            service.refuse,
            max_frame_bytes=max_frame_bytes,
        )
        await _serve_link(worker.serve, link, context)

    calls = {"Describe": describe}
    if service.role == COORDINATOR.role:
        calls |= _reports(worker)
    # Raw bytes, so that our codec decides how to treat a malformed frame.
    methods = {service.stream: grpc.stream_stream_rpc_method_handler(converse)}
    for name, behaviour in calls.items():
        call = service.call(name)
        make = getattr(grpc, f"{call.kind}_rpc_method_handler")
        methods[name] = make(behaviour, call.request.FromString, call.answer.SerializeToString)
    return methods


async def _serve_link(
    serve: Callable[[Link[Any, Any]], Coroutine[Any, Any, None]],
    link: StreamLink[Any, Any],
    context: Any,
) -> None:
    """Run the worker on the link until either ends; the worker always gets time to clean up.
    The caller is told of its failure."""
    serving = asyncio.create_task(serve(link))
    try:
        await asyncio.wait({serving, link.running}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({serving}, timeout=_CLEANUP_GRACE_S)
    except asyncio.CancelledError:
        # The peer has gone or the server stops; the worker sees a broken link in both cases.
        link.sever(WorkerError("the peer has gone"))
        await asyncio.wait({serving}, timeout=_CLEANUP_GRACE_S)
        raise
    finally:
        await end_tasks(serving)
        await link.close()
    error = None if serving.cancelled() else serving.exception()
    if isinstance(error, DrafthouseError):
        await abort(context, error)
    elif error is not None:
        log.error("worker failed on a stream", exc_info=error)
        await abort(context, WorkerError(f"the worker failed: {type(error).__name__}"))


def _guard(service: Service[Any, Any], description: WorkerDescription, trust: Trust) -> Guard:
    keys = trust.keys(service.role, description.name)
    if trust.secrets is not None and not keys.get():
        raise ConfigError.at("data_plane.secret_file", f"it holds no key of {keys.service}")
    tokens = TokenCheck(keys, description.worker_id) if trust.secrets else None
    return Guard(tokens, service.caller if trust.pem is not None else "")


# Runs a server as its own process: a ready line, and a clean end on a signal.


_HEALTH_INTERVAL_S = 1.0


def add_options(parser: ArgumentParser, part: Callable[..., Coroutine[Any, Any, None]]) -> None:
    """Add the options of a part that is started by hand.  part: runs it until a signal comes, with
    the configuration and the options that were given."""
    parser.set_defaults(part=part)
    add = parser.add_argument
    add("config", help="a Ray Serve config file, e.g. configs/local.yaml")
    add("--set", dest="overrides", action="append", default=[], metavar="K=V")
    add("--log-level", default="INFO")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=port, default=0, help="0 = a free port")


async def run_until_signal(
    server: RunningServer, role: str, is_healthy: Callable[[], bool] = lambda: True
) -> None:
    """Print the address of `server`, serve until SIGTERM or SIGINT, then stop it.

    Raises WorkerError when is_healthy() becomes false, so that a supervisor starts a new process.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    sys.stdout.write(f"drafthouse {role} ready: {server.address}\n")
    sys.stdout.flush()
    try:
        while not stopped.is_set():
            if not is_healthy():
                raise WorkerError(f"the {role} is unhealthy; start a new process")
            try:
                await asyncio.wait_for(stopped.wait(), _HEALTH_INTERVAL_S)
            except TimeoutError:
                continue
    finally:
        await server.stop()
