"""Which interfaces an address means."""

from __future__ import annotations

LOOPBACK = "127.0.0.1"


def is_everywhere(host: str) -> bool:
    """Whether a server at `host` listens on all interfaces."""
    return host in ("0.0.0.0", "::")


def from_here(host: str) -> str:
    """Where this machine reaches a server that listens at `host`."""
    return LOOPBACK if is_everywhere(host) else host


def joined(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
