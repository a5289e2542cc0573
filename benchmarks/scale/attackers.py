"""Attacks on an ingress, as a process: `python -m benchmarks.scale.attackers KIND HTTP GRPC OUT`.

Each keeps a rate, so that what the attacker's own machine does is not what is measured.  At its
end it writes how often it was answered how.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import uvloop

from benchmarks.support.processes import exit_on_sigterm

_NUM_SLOW = 500
_METHOD = "/drafthouse.v1.GenerationService/Generate"
_MIB = 1 << 20
_PATIENCE_S = 5.0


answers: Counter[str] = Counter()


async def _send(port: int, *pieces: bytes) -> None:
    """Send on a connection of its own, and read what is answered."""
    told = "cut"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            told = (await reader.read(_MIB)).partition(b"\r\n")[0].decode() or "cut"
    answers[told] += 1
    writer.close()


async def _slow_loris(port: int, _grpc_port: int) -> None:
    """Send a head byte by byte, and come back when it is refused."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for byte in b"POST /v1/completions HTTP/1.1\r\nx-long: " + b"x" * 1000:
                writer.write(bytes([byte]))
                await writer.drain()
                answers["bytes of heads"] += 1
                await asyncio.sleep(1.0)
                if reader.at_eof():
                    break
        await asyncio.sleep(0.1)


async def _header_bomb(port: int, _grpc_port: int) -> None:
    await _send(port, b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"x" * _MIB + b"\r\n\r\n")


async def _oversize(port: int, grpc_port: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (64 * _MIB)
    await asyncio.gather(_send(port, head, b"x" * _MIB), _call(grpc_port, b"x" * (64 * _MIB)))


async def _wrong_key(port: int, _grpc_port: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wrong\r\n"
    await _send(port, head + b"connection: close\r\ncontent-length: 2\r\n\r\n{}")


async def _inflate_bomb(port: int, grpc_port: int) -> None:
    bomb = zlib.compress(b"\0" * (64 * _MIB))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-encoding: deflate\r\n"
    sent = head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(bomb)
    packed = grpc.Compression.Deflate
    await asyncio.gather(_send(port, sent + bomb), _call(grpc_port, b"\0" * (4 * _MIB), packed))


async def _call(
    port: int, message: bytes, compression: grpc.Compression = grpc.Compression.NoCompression
) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(_METHOD)(message, compression=compression, timeout=_PATIENCE_S)
        with contextlib.suppress(grpc.RpcError):
            async for _ in call:
                continue
        answers[f"gRPC {(await call.code()).name}"] += 1


Attack = Callable[[int, int], Awaitable[None]]
# By kind: the attack and how often a second it is made; 0 = by so many at once, who never end.
ATTACKS: dict[str, tuple[Attack, float]] = {
    "slow loris": (_slow_loris, 0.0),
    "header bombs": (_header_bomb, 50.0),
    "inflate bombs": (_inflate_bomb, 10.0),
    "wrong keys": (_wrong_key, 500.0),
    "oversize messages": (_oversize, 5.0),
}


async def _attack(kind: str, port: int, grpc_port: int) -> None:
    attack, rate = ATTACKS[kind]
    sys.stdout.write("attacking\n")
    sys.stdout.flush()
    if not rate:
        await asyncio.gather(*(attack(port, grpc_port) for _ in range(_NUM_SLOW)))
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(_tried(attack(port, grpc_port)))
            await asyncio.sleep(1.0 / rate)


async def _tried(attack: Awaitable[None]) -> None:
    with contextlib.suppress(OSError):
        await attack


if __name__ == "__main__":
    exit_on_sigterm()
    try:
        uvloop.run(_attack(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    finally:
        Path(sys.argv[4]).write_text(json.dumps(answers), "utf-8")
