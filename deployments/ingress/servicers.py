"""The services that Ray Serve's gRPC proxy registers for us (`grpc_servicer_functions`).

The proxy passes requests as bytes and the ingress parses them, so that we answer malformed, too
large and non-UTF-8 requests with our own status, and the proxy stays fast.
"""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import grpc

# The proxy's reflection service shows these descriptors.
from grpc_health.v1 import health_pb2

from cluster.client.generated import generation_pb2
from cluster.config.schema import IngressConfig

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


# Serve's variable for the largest message of its gRPC proxies; its default is 2 GiB.
MESSAGE_LIMIT = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"
# The limit also applies to answers; the longest, with log-probabilities, stay far below this.
_LEAST_MESSAGE_BYTES = 4 * 1024 * 1024


def message_limit(settings: IngressConfig) -> int:
    """Largest message of the proxies, in bytes: leaves the refusal to the ingress."""
    return min(max(2 * settings.max_body_bytes, _LEAST_MESSAGE_BYTES), 2**31 - 1)


def add_generation(servicer: Any, server: Any) -> None:
    """Register drafthouse.v1.GenerationService."""
    _add(servicer, server, GENERATION, "Generate", "ListModels", "Tokenize", "Detokenize")


def add_health(servicer: Any, server: Any) -> None:
    """Register grpc.health.v1.Health."""
    _add(servicer, server, HEALTH, "Watch", "Check")


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
