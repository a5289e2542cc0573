"""The example in another language works with what our server says of itself, and nothing else."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_reflection.v1alpha import reflection

from cluster.client.generated.generation_pb2_grpc import (
    add_GenerationServiceServicer_to_server,
)
from tests.conftest import REPOSITORY, command
from tests.support.rpc.scripted_service import Break, ScriptedService, expected_text

EXAMPLE = REPOSITORY / "docs" / "examples" / "node"
SERVICE = "drafthouse.v1.GenerationService"

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(
        not (EXAMPLE / "node_modules").is_dir(),
        reason=f"its packages are not installed: npm ci --prefix {EXAMPLE.name}",
    ),
]


@pytest.fixture
async def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
async def address(service: ScriptedService) -> AsyncIterator[str]:
    """A server as the product's own listener: the service and reflection, no more."""
    server = grpc.aio.server()
    add_GenerationServiceServicer_to_server(service, server)
    reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def run(*words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(command, "node", "generate.mjs", *words, folder=EXAMPLE)


async def test_the_text_is_printed_as_the_server_sends_it(service: ScriptedService, address: str):
    done = await run(address, "toy", "a prompt", "17")
    assert done.returncode == 0, done.stderr
    seed = service.drawn_seed
    assert done.stdout == expected_text(seed, 0) + "\n"
    assert f"12 tokens with seed {seed}" in done.stderr
    (asked,) = service.requests
    assert (asked.model, asked.text, asked.sampling.max_tokens) == ("toy", "a prompt", 17)


async def test_an_error_names_status_reason_and_field(service: ScriptedService, address: str):
    metadata = (("drafthouse-param", "temperature"),)
    refused = Break(grpc.StatusCode.INVALID_ARGUMENT, "too hot; use 0 or more", metadata)
    service.breaks.append((0, refused))
    done = await run(address, "toy", "a prompt")
    assert done.returncode == 1
    assert "INVALID_ARGUMENT: too hot; use 0 or more (temperature)" in done.stderr


async def test_a_missing_word_is_explained():
    done = await run("127.0.0.1:1")
    assert done.returncode == 2
    assert "usage" in done.stderr
