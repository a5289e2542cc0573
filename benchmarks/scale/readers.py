"""Clients that cost little: they count the tokens of streams and look at nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

import grpc

from benchmarks.scale.stack import MODEL
from cluster.client.generated import generation_pb2 as pb

PROMPT = [3 + number % 500 for number in range(60)]
_ENDLESS = 1_000_000  # tokens: streams end when the client goes
_METHOD = "/drafthouse.v1.GenerationService/Generate"


class HttpReader(asyncio.Protocol):
    """One stream of server-sent events.  num_events: that have come.  begun: one has."""

    def __init__(self, headers: Sequence[str] = (), *, is_chat: bool = False) -> None:
        self.num_events = 0
        self.begun = asyncio.Event()
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": _ENDLESS, "stream": True}
        if is_chat:
            asked["messages"] = [{"role": "user", "content": "Go on."}]
        else:
            asked["prompt"] = PROMPT
        body = json.dumps(asked).encode()
        lines = [
            f"POST /v1/{'chat/' if is_chat else ''}completions HTTP/1.1",
            "host: localhost",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *headers,
        ]
        self._request = "\r\n".join([*lines, "", ""]).encode() + body
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: {")
        self.begun.set()

    def close(self) -> None:
        self.transport.abort()


class GrpcReader:
    """One call of Generate."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.num_events = 0
        self.begun = asyncio.Event()
        sampling = pb.SamplingOptions(max_tokens=_ENDLESS)
        asked = pb.GenerateRequest(
            model=MODEL, tokens=pb.TokenIds(token_ids=PROMPT), sampling=sampling
        )
        self._call: Any = channel.unary_stream(_METHOD)(asked.SerializeToString())
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for _ in self._call:
            self.num_events += 1
            self.begun.set()

    def close(self) -> None:
        self._reading.cancel()
        self._call.cancel()
