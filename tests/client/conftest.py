"""Servers for the client, and both clients behind one signature."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from cluster.client import AsyncClient, Client, Endpoint, GenerateRequest, GenerateResponse, retry
from cluster.client.generated.generation_pb2_grpc import (
    add_GenerationServiceServicer_to_server,
)

Complete = Callable[..., GenerateResponse]
Serve = Callable[..., str]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the usual wait before a call is made again."""
    monkeypatch.setattr(retry, "_FIRST_DELAY_S", 1e-2 * retry._FIRST_DELAY_S)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(service, credentials=None)`: the address where it is served."""
    servers = []

    def start(service: Any, credentials: grpc.ServerCredentials | None = None) -> str:
        server = grpc.server(ThreadPoolExecutor(max_workers=4))
        add_GenerationServiceServicer_to_server(service, server)
        if credentials is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(0).wait()


def complete_blocking(
    endpoint: str | Endpoint, request: GenerateRequest, timeout_s: float = 60.0
) -> GenerateResponse:
    with Client(endpoint, max_retries=2) as client:
        return client.complete(request, timeout_s=timeout_s)


def complete_asyncio(
    endpoint: str | Endpoint, request: GenerateRequest, timeout_s: float = 60.0
) -> GenerateResponse:
    async def run() -> GenerateResponse:
        async with AsyncClient(endpoint, max_retries=2) as client:
            return await client.complete(request, timeout_s=timeout_s)

    return asyncio.run(run())


@pytest.fixture(params=[complete_blocking, complete_asyncio], ids=["blocking", "asyncio"])
def complete(request: pytest.FixtureRequest) -> Complete:
    """Ask with either client, with two retries."""
    return request.param
