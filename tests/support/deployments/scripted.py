"""The HTTP and gRPC API over a real coordinator and a toy target, without Ray."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from starlette.types import ASGIApp

from cluster.config.schema import Config
from cluster.coordinator.coordinator import Coordinator
from cluster.core import SamplingParams
from cluster.records import frozen
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.grpc_api import GrpcListener
from deployments.ingress.http import create_app
from deployments.ingress.http_listener import HttpListener
from deployments.ingress.ingress import Ingress
from tests.deployments.conftest import free_ports
from tests.support.coordinator.house import house
from tests.support.coordinator.toys import ToyTarget
from tests.support.deployments.stage import Nowhere, Stage
from tests.support.deployments.threads import in_a_thread


@frozen
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
    place = _served(folder, config, toy or ToyTarget(step_turns=1), watched, limits)
    with in_a_thread(place) as found:
        yield found


@asynccontextmanager
async def _served(
    folder: Path,
    config: Config,
    toy: ToyTarget,
    watched: Callable[[ASGIApp], ASGIApp],
    limits: dict[str, int],
) -> AsyncIterator[Scripted]:
    http_port, grpc_port = free_ports(2)
    config = replace(
        config,
        http=replace(config.http, port=http_port),
        grpc=replace(config.grpc, port=grpc_port),
    )
    ingress = Ingress(config, Tokenizer.load(folder), SamplingParams(max_tokens=0), Nowhere())
    stage = Stage(ingress.coordinators)
    settings = {"max_queued_requests": config.coordinator.max_queued_requests}
    async with house((), **settings) as rooms, AsyncExitStack() as stack:
        stage.add("a", rooms, toy, **limits)
        stack.push_async_callback(stage.close)
        for listener in (
            GrpcListener(ingress, 5.0),
            HttpListener(watched(create_app(ingress)), config.http, 1.0),
        ):
            await listener.start()
            stack.push_async_callback(listener.stop)
        yield Scripted(http_port, grpc_port, rooms.coordinator, asyncio.get_running_loop())
