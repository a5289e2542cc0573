"""Many clients that read fifty bytes a second, as a program of its own: it prints what they saw.

    python tests/support/deployments/slow_readers.py PORT COUNT SPREAD_S MAX_TOKENS

They come evenly over SPREAD_S seconds, then all read on until a line comes on stdin.
"""

import heapq
import json
import resource
import selectors
import socket
import sys
import time

BYTES_PER_S = 50
# So that what is not read waits at the server, not in our kernel's buffers.
RECEIVE_BUFFER = 4096


def body(max_tokens: int) -> bytes:
    asked = {
        "model": "toy",
        "prompt": [1, 2, 3],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    return json.dumps(asked).encode()


def opened(port: int, data: bytes) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    client.connect(("127.0.0.1", port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    client.setblocking(False)
    return client


def main(port: int, count: int, spread_s: float, max_tokens: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * count + 100)), hard))
    data, waiting = body(max_tokens), selectors.DefaultSelector()
    waiting.register(sys.stdin, selectors.EVENT_READ)
    first_bytes: list[float] = []
    due: list[tuple[float, int, socket.socket]] = []
    clients: list[socket.socket] = []
    num_bytes = num_ended = 0
    started_at = time.monotonic()
    while True:
        now = time.monotonic()
        while len(clients) < count and now >= started_at + len(clients) * spread_s / count:
            clients.append(opened(port, data))
            waiting.register(clients[-1], selectors.EVENT_READ, time.monotonic())
        for key, _ in waiting.select(0.005):
            if key.fileobj is sys.stdin:
                say(first_bytes, num_bytes, num_ended, is_last=True)
                return
            client: socket.socket = key.fileobj
            first_bytes.append(time.monotonic() - key.data)
            waiting.unregister(client)
            heapq.heappush(due, (time.monotonic(), len(first_bytes), client))
            if len(first_bytes) == count:
                say(first_bytes, num_bytes, num_ended, is_last=False)
        while due and due[0][0] <= time.monotonic():
            at, number, client = heapq.heappop(due)
            try:
                piece = client.recv(BYTES_PER_S)
            except BlockingIOError:
                piece = None
            if piece == b"":
                num_ended += 1
                continue
            num_bytes += len(piece or b"")
            heapq.heappush(due, (at + 1.0, number, client))


def say(first_bytes: list[float], num_bytes: int, num_ended: int, *, is_last: bool) -> None:
    record = {
        "first_byte_s": max(first_bytes, default=0.0),
        "num_started": len(first_bytes),
        "num_bytes": num_bytes,
        "num_ended": num_ended,
        "is_last": is_last,
    }
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
