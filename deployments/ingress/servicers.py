"""The services that Ray Serve's gRPC proxy offers for us (`grpc_servicer_functions`).

Requests pass the proxy as bytes and are parsed by the ingress: what is malformed, too large or
not UTF-8 is then answered by us, with a status that says so, and the proxy stays quick.
"""

from __future__ import annotations

from typing import Any

import grpc

# Their descriptors are what the proxy's reflection service shows.
from grpc_health.v1 import health_pb2

from cluster.config import IngressConfig
from cluster.rpc.generated import generation_pb2

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


# Serve's variable for the largest message of its gRPC proxies, whose own default is 2 GiB.
MESSAGE_LIMIT = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"
# Answers pass the same limit; the longest, with log-probabilities, stay far below this.
_LEAST_MESSAGE_BYTES = 4 * 1024 * 1024


def message_limit(settings: IngressConfig) -> int:
    """Bytes of a message that the proxies take: room for the ingress to refuse in its own words."""
    return min(max(2 * settings.max_body_bytes, _LEAST_MESSAGE_BYTES), 2**31 - 1)


def add_generation(servicer: Any, server: Any) -> None:
    """Register drafthouse.v1.GenerationService."""
    _add(server, GENERATION, {"Generate": grpc.unary_stream_rpc_method_handler(servicer.Generate)})


def add_health(servicer: Any, server: Any) -> None:
    """Register grpc.health.v1.Health."""
    _add(
        server,
        HEALTH,
        {
            "Check": grpc.unary_unary_rpc_method_handler(servicer.Check),
            "Watch": grpc.unary_stream_rpc_method_handler(servicer.Watch),
        },
    )


def _add(server: Any, service: str, handlers: dict[str, Any]) -> None:
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
