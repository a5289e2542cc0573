"""How one process shows the others who it is, knows who they are, and lets them in.

Tokens are asked for wherever there is a secret; with certificates, connections are encrypted and
both ends show one that names their role.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from cluster.config.doors import is_loopback
from cluster.config.pem import DataPlaneConfig, Pem, Reloaded, dns_name
from cluster.errors import ConfigError
from cluster.logs import OnceAMinute
from cluster.records import frozen
from cluster.rpc.tokens import Secrets, ServiceKeys, TokenCheck, secrets_of


@frozen
class Trust:
    """secrets: of the cluster; None = no tokens, for loopback only.  pem: of this process' role;
    None = no TLS."""

    secrets: Secrets | None = None
    pem: Reloaded[Pem] | None = None

    def keys(self, role: str, name: str) -> ServiceKeys:
        """Return the keys of the targets, of the coordinators, or of the drafters called `name`."""
        service = f"drafter {name}" if role == "drafter" else role
        return ServiceKeys(self.secrets or (lambda: ()), service)

    def check_at(self, host: str) -> None:
        """Raise ConfigError for a server that strangers would reach and nothing protects."""
        if self.secrets is None and not is_loopback(host):
            raise ConfigError.at(
                "data_plane.secret_file",
                f"others reach {host}, and nothing tells them from parts of this cluster; name a "
                "file with a secret that all parts have, or listen on 127.0.0.1",
            )

    def channel(
        self, address: str, role: str, options: Sequence[tuple[str, int | str]]
    ) -> grpc.aio.Channel:
        """Open a channel to a server of that role."""
        if self.pem is None:
            return grpc.aio.insecure_channel(address, options=options)
        pem = self.pem.get()
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
        named = [*options, ("grpc.ssl_target_name_override", dns_name(role))]
        return grpc.aio.secure_channel(address, credentials, options=named)

    def listen(self, server: grpc.aio.Server, where: str) -> int:
        """Have a server listen at "host:port"; returns the port.  RuntimeError if it is taken."""
        if self.pem is None:
            return int(server.add_insecure_port(where))
        return int(server.add_secure_port(where, server_credentials(self.pem)))


# For parts of one machine that strangers do not reach.
NO_TRUST = Trust()


def trust_of(config: DataPlaneConfig, role: str) -> Trust:
    """Return what the configuration names, for a process of that role.

    Raises ConfigError for files that cannot be used."""
    secrets = secrets_of(config.secret_file) if config.secret_file else None
    return Trust(secrets, config.tls.pem_of(role))


def server_credentials(pem: Reloaded[Pem]) -> grpc.ServerCredentials:
    """Return credentials that follow the files; who connects must show a certificate where they
    name authorities."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        now = pem.get()
        pairs = [(now.key, now.cert)]
        return grpc.ssl_server_certificate_configuration(pairs, root_certificates=now.ca or None)

    # gRPC asks at every handshake, of connections that are open nothing changes.
    return grpc.dynamic_ssl_server_credentials(
        configuration(), configuration, require_client_authentication=bool(pem.get().ca)
    )


# The door of a data plane server: who may call which method, before its handler runs.


log = logging.getLogger(__name__)

_CHECK = f"/{health.SERVICE_NAME}/Check"
_NAMES = "x509_subject_alternative_name"

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Lets in calls with a good token, and of the one role that may call; and health checks."""

    def __init__(self, tokens: TokenCheck | None, caller: str) -> None:
        """tokens: None asks for none.  caller: the role that the peer's certificate must name; ""
        asks for none."""
        self._tokens = tokens
        self._caller = caller
        # A stranger who knocks all the time must not fill the disk.
        self._said = OnceAMinute()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        call = handler_call_details
        if call.method == _CHECK:
            return await continuation(call)
        if self._tokens is not None:
            reason = self._tokens.refusal(call.method, call.invocation_metadata)
            if reason:
                self._note(call.method, reason)
                return refusing(grpc.StatusCode.UNAUTHENTICATED, reason)
        handler = await continuation(call)
        if handler is None or not self._caller:
            return handler
        return self._asking_for_role(handler, call.method)

    def _asking_for_role(self, handler: Any, method: str) -> Any:
        """Return `handler`, which first looks at the peer's certificate."""
        sides = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if is_stream else "unary" for is_stream in sides)
        behaviour = getattr(handler, kind)
        wanted = dns_name(self._caller)

        async def checked(request: Any, context: Any) -> Any:
            shown = context.auth_context().get(_NAMES, ())
            names = [name.decode("utf-8", "replace") for name in shown]
            if wanted not in names:
                told = ", ".join(names) or "nobody"
                reason = f"the certificate is of {told}; {wanted} alone may call this"
                self._note(method, reason)
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
            return await behaviour(request, context)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(checked, handler.request_deserializer, handler.response_serializer)

    def _note(self, method: str, reason: str) -> None:
        if self._said.is_due("", time.monotonic()):
            log.warning("refused a call method=%s: %s", method[:100], reason)


def refusing(status: grpc.StatusCode, reason: str, metadata: Sequence[Any] = ()) -> Any:
    """Return a handler of whatever method, which ends the call with that status."""

    async def refuse(_requests: Any, context: Any) -> None:
        await context.abort(status, reason, metadata)

    # As a stream: then gRPC does not wait for the request, which might never come.
    return grpc.stream_stream_rpc_method_handler(refuse)


def health_handler() -> grpc.GenericRpcHandler:
    """`grpc.health.v1.Health/Check` for probes, which have no token: serving, as long as calls are
    taken at all.  It reads no request, so nobody can hold it."""

    async def check(_requests: Any, context: Any) -> None:
        answer = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        await context.write(answer.SerializeToString())

    handlers = {"Check": grpc.stream_stream_rpc_method_handler(check)}
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers)
