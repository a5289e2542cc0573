"""Are our ports free?  Asked before anything is started, so that the answer names a setting."""

from __future__ import annotations

import socket

from cluster.config import Config
from cluster.errors import ConfigError
from deployments.addresses import is_everywhere


def check_free(config: Config) -> None:
    """Raise ConfigError for the first port that another process listens on."""
    wanted = [
        (config.http.host, config.http.port, "http.port", "HTTP"),
        (_probed(config.grpc.host), config.grpc.port, "grpc.port", "gRPC"),
    ]
    if config.dashboard.enabled:
        wanted.append(
            (config.dashboard.host, config.dashboard.port, "dashboard.port", "the dashboard")
        )
    for host, port, setting, what in wanted:
        if not is_free(host, port):
            raise ConfigError(
                f"{setting}: port {port} for {what} is taken by another process; "
                f"end it or pass --set {setting}=PORT",
                param=setting,
            )


def _probed(host: str) -> str:
    # Serve's gRPC proxy, which means all interfaces, listens on IPv6 as well.
    return "::" if is_everywhere(host) else host


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on this address now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if family == socket.AF_INET6 and not _has_ipv6():
        family, host = socket.AF_INET, "0.0.0.0"
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are only winding down is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
