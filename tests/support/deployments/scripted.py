"""The HTTP and gRPC API over a real coordinator and a toy target, without Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp

from cluster.config.schema import Config
from cluster.coordinator.coordinator import Coordinator
from cluster.core import SamplingParams
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.grpc_api import GrpcApi
from deployments.ingress.grpc_listener import GrpcListener
from deployments.ingress.http import create_app
from deployments.ingress.http_listener import HttpListener
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
def scripted(
    folder: Path,
    config: Config,
    toy: ToyTarget | None = None,
    watched: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    **limits: int,
) -> Iterator[Scripted]:
    """Serve until the end of the block, on a thread with an event loop of its own.

    folder: of a tokenizer.  watched: wraps the HTTP API.  limits: of the target.
    """
    site = _Site(folder, config, toy or ToyTarget(step_turns=1), watched, limits)
    thread = threading.Thread(target=lambda: asyncio.run(site.run()), daemon=True)
    thread.start()
    try:
        assert site.is_ready.wait(60)
        yield site.scripted
    finally:
        site.end()
        thread.join()


class _Site:
    def __init__(
        self,
        folder: Path,
        config: Config,
        toy: ToyTarget,
        watched: Callable[[ASGIApp], ASGIApp],
        limits: dict[str, int],
    ) -> None:
        with socket.socket() as first, socket.socket() as second:
            for probe in (first, second):
                probe.bind(("127.0.0.1", 0))
            http_port, grpc_port = (int(probe.getsockname()[1]) for probe in (first, second))
        self._config = dataclasses.replace(
            config,
            http=dataclasses.replace(config.http, port=http_port),
            grpc=dataclasses.replace(config.grpc, port=grpc_port),
        )
        self._folder = folder
        self._toy = toy
        self._watched = watched
        self._limits = limits
        self._ended = asyncio.Event()
        self.is_ready = threading.Event()
        self.scripted: Scripted

    def end(self) -> None:
        self.scripted.loop.call_soon_threadsafe(self._ended.set)

    async def run(self) -> None:
        config = self._config
        tokenizer = Tokenizer.load(self._folder)
        ingress = Ingress(config, tokenizer, SamplingParams(max_tokens=0), Nowhere())
        stage = Stage(ingress.coordinators)
        settings = {"max_queued_requests": config.coordinator.max_queued_requests}
        async with house((), **settings) as rooms:
            stage.add("a", rooms, self._toy, **self._limits)
            listeners = (
                GrpcListener(GrpcApi(ingress), config, 5.0),
                HttpListener(self._watched(create_app(ingress)), config.http, 1.0),
            )
            for listener in listeners:
                await listener.start()
            ports = config.http.port, config.grpc.port
            self.scripted = Scripted(*ports, rooms.coordinator, asyncio.get_running_loop())
            self.is_ready.set()
            try:
                await self._ended.wait()
            finally:
                for listener in listeners:
                    await listener.stop()
                await stage.close()
