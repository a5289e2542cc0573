"""What the ranks of an engine say to each other beside the model's collectives: a socket from rank
0 to each other rank.

No thread and no time limit: an idle leader sends nothing for as long as nobody asks it anything.
But the socket of a rank that has gone is closed, which the other end notices at once.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener

from torch.distributed import Store  # type: ignore[attr-defined]  # it is public all the same

# Else a short message would wait for the other end's word that it has the one before; and where a
# whole machine has gone, nobody closes anything.
_OPTIONS = ((socket.IPPROTO_TCP, socket.TCP_NODELAY), (socket.SOL_SOCKET, socket.SO_KEEPALIVE))


class Channel:
    """One end.  Every rank makes the same calls in the same order.  They raise OSError or EOFError
    where another rank has gone; discard the channel then."""

    def __init__(self, peers: Sequence[Connection], *, leads: bool) -> None:
        """peers: the other ends; of all but the leader one."""
        self._peers = peers
        self._leads = leads
        for peer in peers:
            with socket.socket(fileno=os.dup(peer.fileno())) as same:
                for level, option in _OPTIONS:
                    same.setsockopt(level, option, 1)

    def share(self, body: bytes = b"") -> bytes:
        """The leader's body, on all ranks."""
        if not self._leads:
            return self._peers[0].recv_bytes()
        # The others send nothing unless they are asked.
        if any(peer.poll() for peer in self._peers):
            raise EOFError("a rank has gone")
        for peer in self._peers:
            peer.send_bytes(body)
        return body

    def least(self, value: int) -> int:
        """The least of the ranks' integers, on all ranks."""
        if self._leads:
            others = [int(peer.recv_bytes()) for peer in self._peers]
            return int(self.share(b"%d" % min([value, *others])))
        self._peers[0].send_bytes(b"%d" % value)
        return int(self.share())

    def close(self) -> None:
        """Say and hear nothing any more."""
        for peer in self._peers:
            peer.close()


def connect(rank: int, world_size: int, host: str, store: Store) -> Channel:
    """The channel of all ranks, of which each must call as often as the others.

    host: of rank 0; it listens nowhere else.  store: where they find it.  Its time-out is that of
    waiting for each other.
    """
    key = f"drafthouse/channel/{store.add(f'drafthouse/channels/{rank}', 1)}"
    if rank > 0:
        port, word = json.loads(store.get(key))
        return Channel([Client((host, port), authkey=bytes.fromhex(word))], leads=False)
    word, peers = secrets.token_bytes(), list[Connection]()
    with Listener((host, 0), backlog=world_size, authkey=word) as listener:
        store.set(key, json.dumps([listener.address[1], word.hex()]))
        # Of its own it would wait for ever.
        listener._listener._socket.settimeout(store.timeout.total_seconds())  # type: ignore[attr-defined]
        while len(peers) < world_size - 1:
            with suppress(AuthenticationError, EOFError, ConnectionError):  # it is no rank
                peers.append(listener.accept())
    return Channel(peers, leads=True)
