"""Serves the gRPC API on the ingress's own port, instead of through Ray Serve's proxy.

Serve's proxy always listens on all interfaces; this listener uses the configured one.  All replicas
on a node share the port, and the kernel distributes connections over them.
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from cluster.config.addresses import joined
from cluster.config.pem import Reloaded
from cluster.config.schema import Config
from cluster.errors import ConfigError, DrafthouseError
from cluster.rpc.options import public_server_options
from cluster.rpc.status import status_code, trailing_metadata
from cluster.rpc.trust import Trust, refusing
from deployments.ingress.grpc_api import GrpcApi
from deployments.ingress.servicers import GENERATION, add_generation, add_health, message_limit


class GrpcListener:
    """A server that listens from `start` to `stop`."""

    def __init__(self, api: GrpcApi, config: Config, patience_s: float) -> None:
        """patience_s: how long `stop` waits for calls that are under way.  Raises ConfigError for
        files of `tls` that cannot be used."""
        self._patience_s = patience_s
        self._where = config.grpc
        files = config.tls.files()
        self._trust = Trust(pem=None if files is None else Reloaded(files.paths, files.load))
        self._server = grpc.aio.server(
            options=public_server_options(message_limit(config.ingress), config.max_calls),
            maximum_concurrent_rpcs=config.max_calls,
            interceptors=[_Door(api)],
        )
        add_generation(api, self._server)
        add_health(api, self._server)
        names = (GENERATION, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Start listening; raises ConfigError if the address cannot be bound."""
        where = joined(self._where.host, self._where.port)
        try:
            self._trust.listen(self._server, where)
        except RuntimeError as error:
            raise ConfigError.at(
                "grpc",
                f"{where} cannot be bound on this node; choose another host or port, or set "
                "grpc.listener: serve",
            ) from error
        await self._server.start()

    async def stop(self) -> None:
        """Refuse new calls, give open ones time to end, then break them."""
        await self._server.stop(self._patience_s)


class _Door(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Asks for a key before a message is read: one that never comes must hold no place."""

    def __init__(self, api: GrpcApi) -> None:
        self._api = api

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        call = handler_call_details
        try:
            # Health checks and reflection ask nobody.
            if call.method.startswith(f"/{GENERATION}/"):
                self._api.caller(call.invocation_metadata)
        except DrafthouseError as error:
            return refusing(status_code(error), error.message, trailing_metadata(error))
        return await continuation(call)
