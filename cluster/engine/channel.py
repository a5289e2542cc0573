"""What the ranks of an engine say to each other beside the model's collectives: a socket from rank
0 to each other rank.

No thread and no time limit: an idle leader sends nothing for as long as nobody asks it anything.
But the socket of a rank that has gone is closed, which the other end notices at once.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from torch.distributed import Store  # type: ignore[attr-defined]  # it is public all the same

from cluster.records import record

# Else a short message would wait for the other end's word that it has the one before; and where a
# whole machine has gone, nobody closes anything.
_OPTIONS = ((socket.IPPROTO_TCP, socket.TCP_NODELAY), (socket.SOL_SOCKET, socket.SO_KEEPALIVE))
# Whoever has connected and then says nothing is no rank: a rank answers at once.
_SILENCE_S = 10


@record
class Channel:
    """One end.  Every rank makes the same calls in the same order.  They raise OSError or EOFError
    where another rank has gone; discard the channel then.

    peers: the other ends; of all but the leader one."""

    peers: Sequence[Connection]
    leads: bool

    def share(self, body: bytes = b"") -> bytes:
        """The leader's body, on all ranks."""
        if not self.leads:
            return self.peers[0].recv_bytes()
        # The others send nothing unless they are asked.
        if any(peer.poll() for peer in self.peers):
            raise EOFError("a rank has gone")
        for peer in self.peers:
            peer.send_bytes(body)
        return body

    def least(self, value: int) -> int:
        """The least of the ranks' integers, on all ranks."""
        if self.leads:
            others = [int(peer.recv_bytes()) for peer in self.peers]
            return int(self.share(b"%d" % min([value, *others])))
        self.peers[0].send_bytes(b"%d" % value)
        return int(self.share())

    def close(self) -> None:
        """Say and hear nothing any more."""
        for peer in self.peers:
            peer.close()


def connect(rank: int, world_size: int, host: str, store: Store) -> Channel:
    """The channel of all ranks, of which each must call as often as the others.

    host: of rank 0; it listens nowhere else.  store: where they find it.  Its time-out is that of
    waiting for each other.
    """
    key = f"drafthouse/channel/{store.add(f'drafthouse/channels/{rank}', 1)}"
    if rank > 0:
        port, word = json.loads(store.get(key))
        leader = _connection(socket.create_connection((host, port)))
        answer_challenge(leader, bytes.fromhex(word))
        deliver_challenge(leader, bytes.fromhex(word))
        return Channel([leader], leads=False)
    secret, peers = secrets.token_bytes(), list[Connection]()
    family = socket.getaddrinfo(host, None)[0][0]
    with socket.create_server((host, 0), family=family, backlog=world_size) as server:
        server.settimeout(store.timeout.total_seconds())  # type: ignore[attr-defined]
        store.set(key, json.dumps([server.getsockname()[1], secret.hex()]))
        while len(peers) < world_size - 1:
            taken, _ = server.accept()
            with taken:
                _wait_at_most(_SILENCE_S, taken)
                peer = _connection(taken.dup())
                try:
                    deliver_challenge(peer, secret)
                    answer_challenge(peer, secret)
                except (AuthenticationError, EOFError, OSError):  # it is no rank
                    peer.close()
                    continue
                _wait_at_most(0, taken)
                peers.append(peer)
    return Channel(peers, leads=True)


def _connection(own: socket.socket) -> Connection:
    for level, option in _OPTIONS:
        own.setsockopt(level, option, 1)
    return Connection(own.detach())


def _wait_at_most(seconds: int, own: socket.socket) -> None:
    """For what a socket's other end says; 0 = for ever.  A `Connection` knows no time-out."""
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
