"""Which sockets processes listen on, as the kernel tells (Linux)."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from cluster.records import frozen

_LISTEN = "0A"


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
    sockets = {inode: (host, port) for inode, host, port in _all_listening()}
    found = []
    for pid in pids:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            entries = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:  # it has just ended
            continue
        links = set()
        for entry in entries:
            with contextlib.suppress(OSError):  # closed meanwhile
                links.add(os.readlink(entry))
        for link in links & {f"socket:[{inode}]" for inode in sockets}:
            found.append(Listening(pid, command, *sockets[int(link[8:-1])]))
    return found


def _all_listening() -> Iterator[tuple[int, ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                host, port = fields[1].split(":")
                # Words of 32 bits, each in the machine's own byte order.
                words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
                address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
                yield int(fields[9]), address, int(port, 16)
