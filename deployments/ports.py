"""Can our servers listen where they are to?  Asked before anything is started, so that the answer
names a setting."""

from __future__ import annotations

import errno
import os
import socket
from argparse import ArgumentTypeError

from cluster.config.addresses import LOOPBACK
from cluster.config.schema import Config
from cluster.errors import ConfigError
from cluster.options import whole

# Where Ray's own store listens, if the environment says so; where it cannot, Ray waits for ever.
_RAYS_PORT = "RAY_GCS_SERVER_PORT"


def check_free(config: Config, *, at_any_port: bool = False) -> None:
    """Raise one ConfigError for all addresses that cannot be listened at, with the remedy.

    at_any_port: only the hosts count, for what is not to start now."""
    problems = []
    taken: dict[str, int] = {}
    for section, (host, port) in config.listeners.items():
        error = why_not(host, 0 if at_any_port else port)
        if error is None:
            continue
        if error.errno == errno.EADDRINUSE:
            taken[f"{section}.port"] = port
        elif error.errno in (errno.EACCES, errno.EPERM):
            problems.append(
                f"{section}.port: this user may not listen at {port}; choose one above 1023"
            )
        else:
            problems.append(
                f"{section}.host: {host!r} is no address of this machine ({error.strerror}); "
                "use 127.0.0.1, or 0.0.0.0 for all interfaces"
            )
    if taken:
        named = ", ".join(f"{setting}: port {port}" for setting, port in taken.items())
        remedy = " ".join(f"--set {setting}=PORT" for setting in taken)
        problems.append(
            f"{named} taken by another process; end what listens there or pass {remedy}"
        )
    rays_own = os.environ.get(_RAYS_PORT)
    if rays_own and not at_any_port:
        try:
            is_free = why_not(LOOPBACK, whole(1, 65_535)(rays_own)) is None
        except ArgumentTypeError as error:
            raise ConfigError.at(_RAYS_PORT, str(error)) from error
        if not is_free:
            problems.append(
                f"{_RAYS_PORT}: port {rays_own}, Ray's own, taken by another process; end what "
                "listens there or unset it"
            )
    if problems:
        raise ConfigError("; ".join(problems), param=next(iter(taken), None))


def why_not(host: str, port: int) -> OSError | None:
    """Why a server could not listen on this address now; None if it could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if family == socket.AF_INET6 and not _has_ipv6():
        family, host = socket.AF_INET, "0.0.0.0"
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are only winding down is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
