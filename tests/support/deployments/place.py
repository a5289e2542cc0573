"""An ingress in this process, in front of a coordinator and a toy target that can be held up."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml

from cluster.client.generated import generation_pb2
from cluster.config.doors import AccessConfig, digest_of
from cluster.config.schema import Config, GrpcConfig
from deployments.ingress.grpc_api import GENERATION, GrpcListener
from deployments.ingress.http import create_app
from deployments.ingress.ingress import Ingress
from tests.deployments.conftest import free_port
from tests.support.coordinator import toy_law, toy_target
from tests.support.coordinator.house import House, house
from tests.support.coordinator.toys import ToyTarget
from tests.support.deployments.stage import Stage, toys_ingress

PLAIN = Config()
USER = {"role": "user", "content": "hello"}
# One request for each endpoint that generates.
BODIES = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": [USER], "max_tokens": 4},
}


def write_keys(
    path: Path, classes: dict[str, Any] | None = None, **keys: dict[str, Any]
) -> AccessConfig:
    """Write a file of keys by their names, each of which is its owner's key too; the section that
    names it."""
    entries = {name: {"sha256": digest_of(name), **rest} for name, rest in keys.items()}
    path.write_text(yaml.safe_dump({"keys": entries, "classes": classes or {}}))
    return AccessConfig(str(path))


def bearer(key: str) -> dict[str, str]:
    """The header that shows a key, if there is one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass
class Place:
    """An ingress in front of a target that answers when `toy.gate` is open.  app: its HTTP API."""

    ingress: Ingress
    app: Any
    client: httpx.AsyncClient
    toy: ToyTarget
    rooms: House

    def ask(
        self, path: str, *, key: str = "", headers: dict[str, str] | None = None, **fields: Any
    ) -> asyncio.Task[httpx.Response]:
        """Send the request of an endpoint, with other fields, a key and other headers."""
        body = {"model": "toy", **BODIES[path], **fields}
        headers = {**(headers or {}), **bearer(key)}
        return asyncio.create_task(self.client.post(path, json=body, headers=headers))

    async def wait_for_running(self, count: int) -> None:
        async with asyncio.timeout(20):
            while self.rooms.coordinator.status()["num_running"] < count:
                await self.rooms.settle()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[tuple[grpc.aio.Channel, GrpcListener]]:
        """Serve gRPC until the end of the block."""
        listener = GrpcListener(self.ingress, 60.0)
        await listener.start()
        where = f"127.0.0.1:{self.ingress.config.grpc.port}"
        async with grpc.aio.insecure_channel(where) as channel:
            try:
                yield channel, listener
            finally:
                await listener.stop()


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    """Status, type and code of an error; Anthropic's have none."""
    error = answer.json()["error"]
    return answer.status_code, error["type"], error.get("code", "")


def generate(
    channel: grpc.aio.Channel, key: str = "", timeout: float | None = None, **fields: Any
) -> Any:
    """Call Generate for a few tokens."""
    sampling = generation_pb2.SamplingOptions(max_tokens=4)
    request = generation_pb2.GenerateRequest(model="toy", text="x", sampling=sampling, **fields)
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    calls = channel.unary_stream(f"/{GENERATION}/Generate")
    return calls(request.SerializeToString(), metadata=metadata, timeout=timeout)


@asynccontextmanager
async def place(config: Config = PLAIN, **settings: Any) -> AsyncIterator[Place]:
    """Serve the toy until the end of the block.  settings: of its coordinator."""
    config = dataclasses.replace(config, model_name="toy", grpc=GrpcConfig(port=free_port()))
    ingress = toys_ingress(config)
    setting = Stage(ingress.coordinators)
    app = create_app(ingress)
    transport = httpx.ASGITransport(app)
    with pytest.MonkeyPatch.context() as patch:
        # The toy reads whatever the tokenizer writes: conversations are texts.
        for module in (toy_law, toy_target):
            patch.setattr(module, "VOCAB_SIZE", ingress.tokenizer.vocab_size)
        toy_law.forget()
        async with (
            house(tuple(config.drafters), **settings) as rooms,
            httpx.AsyncClient(transport=transport, base_url="http://[::1]", timeout=60) as client,
        ):
            toy = setting.add("a", rooms)
            await asyncio.sleep(0)
            try:
                yield Place(ingress, app, client, toy, rooms)
            finally:
                await setting.close()
    toy_law.forget()


@asynccontextmanager
async def held(config: Config = PLAIN, **settings: Any) -> AsyncIterator[Place]:
    """A place whose target waits."""
    async with place(config, **settings) as here:
        here.toy.gate.clear()
        yield here
