"""What an operator can set of the public endpoints: sections of `cluster.config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """The HTTP API, beside the limits in `ingress`.

    compatibility: strict = a field that api.md does not list is answered 400. lenient = it has no
    effect, and the header Warning of the answer names it; refused fields stay refused.
    """

    compatibility: Literal["strict", "lenient"] = "strict"


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The OpenAI-compatible endpoint: Ray Serve's `http_options`.

    host: the interface to listen on; 0.0.0.0 = all.  port: TCP port.
    """

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
