"""The HTTP and gRPC API over a real coordinator and a toy target, without Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from cluster.config.schema import Config
from cluster.coordinator.coordinator import Coordinator
from cluster.core import SamplingParams
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.grpc_api import GrpcApi
from deployments.ingress.grpc_listener import GrpcListener
from deployments.ingress.http import create_app
from deployments.ingress.ingress import Ingress
from tests.support.coordinator.house import house
from tests.support.coordinator.toys import ToyTarget
from tests.support.deployments.stage import Nowhere, Stage


@dataclass(frozen=True, slots=True)
class Scripted:
    """port, grpc_port: on the loopback interface."""

    port: int
    grpc_port: int
    coordinator: Coordinator
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def num_running(self) -> int:
        """Requests that the coordinator holds, read on its own loop."""

        async def read() -> int:
            return int(self.coordinator.status()["num_running"])

        return asyncio.run_coroutine_threadsafe(read(), self.loop).result(60)


@contextmanager
def scripted(folder: Path, config: Config, **limits: int) -> Iterator[Scripted]:
    """Serve until the end of the block, on a thread with an event loop of its own.

    folder: of a tokenizer.  limits: of the target.
    """
    site = _Site(folder, config, limits)
    thread = threading.Thread(target=lambda: asyncio.run(site.run()), daemon=True)
    thread.start()
    try:
        assert site.is_ready.wait(60)
        yield site.scripted
    finally:
        site.uvicorn.should_exit = True
        thread.join()


class _Site:
    def __init__(self, folder: Path, config: Config, limits: dict[str, int]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            grpc_port = int(probe.getsockname()[1])
        where = dataclasses.replace(config.grpc, port=grpc_port)
        self._config = dataclasses.replace(config, grpc=where)
        self._folder = folder
        self._limits = limits
        self.is_ready = threading.Event()
        self.scripted: Scripted
        self.uvicorn: uvicorn.Server

    async def run(self) -> None:
        tokenizer = Tokenizer.load(self._folder)
        ingress = Ingress(self._config, tokenizer, SamplingParams(max_tokens=0), Nowhere())
        stage = Stage(ingress.coordinators)
        settings = {"max_queued_requests": self._config.coordinator.max_queued_requests}
        async with house((), **settings) as rooms:
            stage.add("a", rooms, ToyTarget(step_turns=1), **self._limits)
            listener = GrpcListener(GrpcApi(ingress), self._config, 5.0)
            await listener.start()
            where = socket.create_server(("127.0.0.1", 0), backlog=2048)
            port = where.getsockname()[1]
            loop = asyncio.get_running_loop()
            self.scripted = Scripted(port, self._config.grpc.port, rooms.coordinator, loop)
            self.uvicorn = uvicorn.Server(
                uvicorn.Config(
                    create_app(ingress),
                    log_level="warning",
                    lifespan="off",
                    timeout_graceful_shutdown=1,
                )
            )
            self.is_ready.set()
            try:
                await self.uvicorn.serve([where])
            finally:
                await listener.stop()
                await stage.close()
