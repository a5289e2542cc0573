"""Which sockets processes listen on."""

import contextlib
import ipaddress
from collections.abc import Iterable

import psutil

from cluster.records import frozen


@frozen
class Listening:
    pid: int
    command: str
    host: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int

    @property
    def is_on_loopback(self) -> bool:
        mapped = getattr(self.host, "ipv4_mapped", None)
        return bool((mapped or self.host).is_loopback)


def listening(pids: Iterable[int]) -> list[Listening]:
    """Every TCP socket that one of these processes listens on."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    host, port = each.laddr
                    found.append(Listening(pid, command, ipaddress.ip_address(host), port))
    return found
