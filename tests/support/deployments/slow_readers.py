"""Many clients that read fifty bytes a second, as a program of its own: it prints what they saw.

    python tests/support/deployments/slow_readers.py PORT COUNT SPREAD_S MAX_TOKENS

They come evenly over SPREAD_S seconds, then all read on until a line comes on stdin.
"""

import asyncio
import json
import resource
import socket
import sys

BYTES_PER_S = 50
# So that what is not read waits at the server, not in our kernel's buffers.
RECEIVE_BUFFER = 4096


class Readers:
    """first_bytes_s: of each that has begun.  num_ended: streams that the server has ended."""

    def __init__(self, port: int, max_tokens: int) -> None:
        asked = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": max_tokens}
        asked |= {"ignore_eos": True, "stream": True, "temperature": 0}
        body = json.dumps(asked)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        self._request = f"{head}\r\n\r\n{body}".encode()
        self._where = ("127.0.0.1", port)
        self.begun = asyncio.Semaphore(0)
        self.first_bytes_s = []
        self.num_bytes = self.num_ended = 0

    async def read(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            client.setblocking(False)
            await loop.sock_connect(client, self._where)
            await loop.sock_sendall(client, self._request)
            asked_at, is_first = loop.time(), True
            while piece := await loop.sock_recv(client, BYTES_PER_S):
                if is_first:
                    self.first_bytes_s.append(loop.time() - asked_at)
                    self.begun.release()
                is_first = False
                self.num_bytes += len(piece)
                await asyncio.sleep(1.0)
        self.num_ended += 1

    def say(self) -> None:
        record = {
            "first_byte_s": max(self.first_bytes_s),
            "num_started": len(self.first_bytes_s),
            "num_bytes": self.num_bytes,
            "num_ended": self.num_ended,
        }
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()


async def main(port: int, count: int, spread_s: float, max_tokens: int) -> None:
    readers = Readers(port, max_tokens)
    async with asyncio.TaskGroup() as group:
        waits = (number * spread_s / count for number in range(count))
        tasks = [group.create_task(readers.read(wait_s)) for wait_s in waits]
        for _ in range(count):
            await readers.begun.acquire()
        readers.say()
        await asyncio.to_thread(sys.stdin.readline)
        readers.say()
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * number + 100)), hard))
    asyncio.run(main(int(sys.argv[1]), number, float(sys.argv[3]), int(sys.argv[4])))
