"""What an operator can set of the public endpoints: sections of `cluster.config.schema`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """The HTTP API, beside the limits in `ingress`.

    compatibility: strict = a field that api.md does not list is answered 400. lenient = it has no
    effect, and the header Warning of the answer names it; refused fields stay refused.
    served_model_names: names that clients may use beside model_name; an answer has the one that its
    request used.
    cors_origins: pages from these origins may call the API from a browser (`https://host[:port]`);
    "*" = from any.
    heartbeat_s: a stream without an event for so long, say of a request that queues, gets a
    comment, which keeps proxies from cutting it. 0 = never.
    max_request_timeout_s: an answer that is not ready after this time is given up, with 504. A
    request asks for less with the header x-request-timeout-ms. 0 = no limit.
    max_stored_responses: answers of /v1/responses that are kept, by each ingress replica, for
    previous_response_id; the oldest go first. 0 = none.
    max_stored_bytes: what they may take together, in bytes of their messages.
    """

    compatibility: Literal["strict", "lenient"] = "strict"
    served_model_names: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    heartbeat_s: float = 15.0
    max_request_timeout_s: float = 0.0
    max_stored_responses: int = 1024
    max_stored_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The OpenAI-compatible endpoint.

    listener: ingress = every ingress replica listens at host and port of its own node. serve = Ray
    Serve's proxies listen on every node, at the host and port in Serve's own `http_options`, and
    pass everything on, which costs a third of a millisecond of CPU per token and stream.
    host: the interface to listen on; 0.0.0.0 = all.  port: TCP port.
    """

    listener: Literal["ingress", "serve"] = "ingress"
    host: str = "127.0.0.1"
    port: int = 8000


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """The gRPC endpoint.

    listener: ingress = every ingress replica listens at host and port of its own node. serve = Ray
    Serve's proxies listen on every node, on all interfaces, at the port in Serve's own
    `grpc_options`, which must also name the servicer functions.
    host: the interface to listen on; 0.0.0.0 = all.  port: TCP port.
    """

    listener: Literal["ingress", "serve"] = "ingress"
    host: str = "127.0.0.1"
    port: int = 9000
