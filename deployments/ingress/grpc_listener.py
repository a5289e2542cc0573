"""Serves the gRPC API on a port of the ingress' own.

All replicas on a node share the port, and the kernel distributes connections over them.
"""

from __future__ import annotations

import asyncio
from operator import methodcaller
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from cluster.config.addresses import joined
from cluster.errors import CapacityError, ConfigError, DrafthouseError
from cluster.rpc.options import public_server_options
from cluster.rpc.status import status_code, trailing_metadata
from cluster.rpc.trust import Trust, refusing
from deployments.ingress.grpc_api import GENERATION, GrpcApi
from deployments.ingress.ingress import Ingress

# What gRPC can count.
_MOST_MESSAGE_BYTES = 2**31 - 1


class GrpcListener:
    """A server that listens from `start` to `stop`."""

    def __init__(self, ingress: Ingress, patience_s: float) -> None:
        """patience_s: how long `stop` waits for calls that are under way.  Raises ConfigError for
        files of `tls` that cannot be used."""
        api, config = GrpcApi(ingress), ingress.config
        self._patience_s = patience_s
        self._where = config.grpc
        self._trust = Trust(pem=config.tls.pem())
        # Longer messages are read than are served, so that the refusal is ours.
        max_bytes = min(2 * config.ingress.max_body_bytes, _MOST_MESSAGE_BYTES)
        self._server = grpc.aio.server(
            options=public_server_options(max_bytes, config.max_calls),
            maximum_concurrent_rpcs=config.max_calls,
            interceptors=[_Door(ingress)],
        )
        _add(api, self._server, GENERATION, "Generate", "ListModels", "Tokenize", "Detokenize")
        _add(api, self._server, health.SERVICE_NAME, "Watch", "Check")
        reflection.enable_server_reflection(
            (GENERATION, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> None:
        """Start listening; raises ConfigError if the address cannot be bound."""
        where = joined(self._where.host, self._where.port)
        try:
            self._trust.listen(self._server, where)
        except RuntimeError as error:
            raise ConfigError.at(
                "grpc",
                f"{where} cannot be bound on this node; choose another host or port",
            ) from error
        await self._server.start()

    async def stop(self) -> None:
        """Refuse new calls, give open ones time to end, then break them."""
        await self._server.stop(self._patience_s)


class _Door(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Asks for a key before a message is read: one that never comes must hold no place.

    Health checks and reflection ask nobody, so where there are keys half of the places are for the
    calls that show one."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress
        self._strangers: set[asyncio.Task[Any]] = set()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        call, ingress = handler_call_details, self._ingress
        try:
            if call.method.startswith(f"/{GENERATION}/"):
                ingress.caller(dict(call.invocation_metadata or ()))
            elif not ingress.keys.is_open:
                self._count()
        except DrafthouseError as error:
            return refusing(status_code(error), error.message, trailing_metadata(error))
        return await continuation(call)

    def _count(self) -> None:
        """Count a call without a key until it ends; raises CapacityError for one too many."""
        most, call = self._ingress.config.max_calls // 2, asyncio.current_task()
        if len(self._strangers) >= most:
            raise CapacityError(f"{most} calls for health and reflection are open; end some first")
        assert call is not None  # gRPC runs each in one
        self._strangers.add(call)
        call.add_done_callback(self._strangers.discard)


def _add(servicer: Any, server: Any, service: str, stream: str, *calls: str) -> None:
    """stream: the method with many answers.  calls: those with one."""
    handlers = {
        name: make(getattr(servicer, name), response_serializer=methodcaller("SerializeToString"))
        for name, make in (
            (stream, grpc.unary_stream_rpc_method_handler),
            *((name, grpc.unary_unary_rpc_method_handler) for name in calls),
        )
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
