"""The HTTP API with a real engine in this process, without Ray: it starts within seconds."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn

from cluster.config.schema import ApiConfig, Config, CoordinatorConfig, DrafterConfig
from cluster.coordinator.coordinator import Coordinator
from cluster.engine.engine import Engine
from cluster.rpc.memory import memory_pair
from cluster.text.generation_config import load_sampling_defaults
from cluster.text.tokenizer import Tokenizer
from cluster.worker.build import build_target
from deployments.ingress.http import create_app
from deployments.ingress.ingress import Ingress
from tests.support.deployments.stage import Nowhere
from tests.support.local_models import target

MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class Server:
    """url: where it answers, without a slash.  folder: of the model.  loop: that it runs on."""

    url: str
    folder: Path
    ingress: Ingress
    coordinator: Coordinator
    loop: asyncio.AbstractEventLoop


def tiny_config(folder: Path, api: ApiConfig | None = None) -> Config:
    """A tiny target with a look-up drafter inside it."""
    return Config(
        model_name=MODEL,
        target=replace(target(folder), generation_config="none"),
        drafters={"lookup": DrafterConfig(kind="prompt_lookup")},
        coordinator=CoordinatorConfig(budget="fixed"),
        api=api or ApiConfig(),
    )


@contextmanager
def serving(config: Config) -> Iterator[Server]:
    """Serve until the end of the block, on a thread with an event loop of its own."""
    engine = Engine.load(config.target.engine)
    house = _House(config, engine)
    thread = threading.Thread(target=lambda: asyncio.run(house.run()), daemon=True)
    thread.start()
    assert house.is_ready.wait(60)
    try:
        yield house.server
    finally:
        house.uvicorn.should_exit = True
        thread.join()
        engine.close()


class _House:
    def __init__(self, config: Config, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self.is_ready = threading.Event()
        self.server: Server
        self.uvicorn: uvicorn.Server

    async def run(self) -> None:
        config, folder = self._config, Path(self._config.target.engine.model)
        coordinator = Coordinator(config)
        await coordinator.start()
        worker = build_target(self._engine, config)
        worker.start()
        here, there = memory_pair()
        tasks = [asyncio.create_task(worker.serve(there))]
        coordinator.add_target("target", worker.describe(), here)
        template = config.answers.chat_template
        tokenizer = Tokenizer.load(folder, generation_config="none", chat_template=template)
        defaults = load_sampling_defaults(folder, "none")
        ingress = Ingress(config, tokenizer, defaults, Nowhere())
        here, there = memory_pair()
        tasks += [
            asyncio.create_task(coordinator.serve(there)),
            asyncio.create_task(ingress.coordinators.use("c", coordinator.describe(), here)),
        ]
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = Server(url, folder, ingress, coordinator, asyncio.get_running_loop())
        self.uvicorn = uvicorn.Server(
            uvicorn.Config(create_app(ingress), log_level="warning", lifespan="off")
        )
        self.is_ready.set()
        try:
            await self.uvicorn.serve([listener])
        finally:
            await coordinator.stop()
            worker.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
