"""The HTTP API with a real engine in this process, without Ray: it starts within seconds."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from cluster.config.schema import (
    ApiConfig,
    Config,
    CoordinatorConfig,
    DrafterConfig,
    GrpcConfig,
    HttpConfig,
)
from cluster.coordinator.coordinator import Coordinator
from cluster.engine.engine import Engine
from cluster.records import frozen
from cluster.rpc.link import memory_pair
from cluster.text.generation_config import load_sampling_defaults
from cluster.text.tokenizer import Tokenizer
from cluster.worker.build import build_target
from deployments.ingress.http import create_app
from deployments.ingress.http_listener import HttpListener
from deployments.ingress.ingress import Ingress
from tests.deployments.conftest import free_port
from tests.support.deployments.api import MODEL, Api
from tests.support.deployments.stage import Near, Nowhere, meeting
from tests.support.deployments.threads import in_a_thread
from tests.support.local_models import target

TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t | tojson }}</tool>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}<assistant>"
)


@frozen
class Server(Api):
    """folder: of the model.  loop: that it runs on."""

    folder: Path
    ingress: Ingress
    coordinator: Coordinator
    loop: asyncio.AbstractEventLoop

    def run(self, work: Any) -> Any:
        """What comes of a coroutine on its loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


def tiny_config(folder: Path, api: ApiConfig | None = None) -> Config:
    """A tiny target with a look-up drafter inside it."""
    return Config(
        model_name=MODEL,
        target=replace(target(folder), generation_config="none"),
        drafters={"lookup": DrafterConfig(kind="prompt_lookup")},
        coordinator=CoordinatorConfig(budget="fixed"),
        api=api or ApiConfig(),
    )


def with_tools(folder: Path, copy: Path) -> Path:
    """A copy of the model whose template knows tools."""
    shutil.copytree(folder, copy)
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(copy)
    return copy


@contextmanager
def serving(config: Config) -> Iterator[Server]:
    """Serve until the end of the block, on a thread with an event loop of its own."""
    with (
        closing(Engine.load(config.target.engine)) as engine,
        in_a_thread(_served(config, engine)) as found,
    ):
        yield found


@asynccontextmanager
async def _served(config: Config, engine: Engine) -> AsyncIterator[Server]:
    folder = Path(config.target.engine.model)
    config = replace(config, grpc=GrpcConfig(port=free_port()))
    coordinator = Coordinator(config)
    await coordinator.start()
    worker = build_target(engine, config)
    worker.start()
    here, there = memory_pair()
    tasks = [asyncio.create_task(worker.serve(there))]
    coordinator.add_target("target", worker.describe(), here)
    template = config.answers.chat_template
    tokenizer = Tokenizer.load(folder, generation_config="none", chat_template=template)
    ingress = Ingress(config, tokenizer, load_sampling_defaults(folder, "none"), Nowhere())
    where = HttpConfig(port=free_port())
    http = HttpListener(create_app(ingress), where, 1.0)
    tasks += meeting(ingress.coordinators, "c", Near(coordinator))
    await http.start()
    url = f"http://{where.host}:{where.port}"
    try:
        yield Server(url, folder, ingress, coordinator, asyncio.get_running_loop())
    finally:
        await http.stop()
        await coordinator.stop()
        worker.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
