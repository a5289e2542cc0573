"""Hosts and addresses: which there are, how they are written, and who reaches them."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from typing import Annotated
from urllib.parse import urlsplit

from cluster.config.parse import Readable

LOOPBACK = "127.0.0.1"
_LOOPBACK_OF = {"0.0.0.0": LOOPBACK, "::": "::1"}

_BRACKETED = re.compile(r"\[(.*:.*)\]")
# As in RFC 1123, and with the '_' of many a machine's own name.
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")


def host_of(text: str) -> str:
    """Return a host as sockets take it: an IPv6 address without its brackets.

    Raises ValueError for what is neither an IP address nor a machine's name."""
    bracketed = _BRACKETED.fullmatch(text)
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(bracketed[1] if bracketed else text))
    # What ends in a number is an IPv4 address to whoever looks it up.
    if _NAME.fullmatch(text) and not text.rstrip(".").rpartition(".")[2].isdigit():
        return text
    raise ValueError("write an IP address, such as 127.0.0.1 or ::1, or a machine's name")


def joined(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(text: str) -> str:
    """Return an address of HTTP, or ""; raises ValueError for another text."""
    if not text:
        return text
    parts = urlsplit(text)
    # White space inside is dropped there without a word.
    if parts.scheme not in ("http", "https") or text.split() != [text]:
        raise ValueError("write http://HOST:PORT or https://HOST:PORT, and a path where it has one")
    host_of(parts.hostname or "")
    if parts.port == 0:
        raise ValueError("port 0 is nobody's; name the one that is listened at")
    return text


def free_port() -> int:
    """A port of loopback that nobody uses now; torch's rendezvous binds it a moment later."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def is_loopback(host: str) -> bool:
    """True if `host` is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_everywhere(host: str) -> bool:
    """Whether a server at `host` listens on all interfaces."""
    return host in _LOOPBACK_OF


def from_here(host: str) -> str:
    """Where this machine reaches a server that listens at `host`."""
    return _LOOPBACK_OF.get(host, host)


Host = Annotated[str, Readable("host", host_of)]
Url = Annotated[str, Readable("address of HTTP", url_of)]
