"""Connecting refuses mismatched workers; servers answer health checks, and no reflection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.errors import ConfigError, ProtocolError, WorkerError
from cluster.messages import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from cluster.rpc.channel import Expectations, connect_drafter, connect_target
from cluster.rpc.server import serve_coordinator, serve_drafter, serve_target
from tests.support.rpc.toys import TARGET, EchoCoordinator, EchoDrafter, EchoTarget, stopping


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_an_expected_worker_is_connected(host: str) -> None:
    async with stopping(await serve_target(EchoTarget(), host)) as server:
        expected = Expectations(TARGET.worker_id, TARGET.tokenizer_hash)
        _, link = await connect_target(server.address, expected)
        await link.close()


@pytest.mark.parametrize(
    ("changed", "expected", "theirs", "ours"),
    [
        (
            {"protocol_version": 99, "oldest_protocol_version": 98},
            Expectations(),
            "99",
            str(PROTOCOL_VERSION),
        ),
        (
            {"protocol_version": 99, "oldest_protocol_version": 0},
            Expectations(),
            "99",
            str(PROTOCOL_VERSION),
        ),
        (
            {"protocol_version": OLDEST_PROTOCOL_VERSION - 1},
            Expectations(),
            str(OLDEST_PROTOCOL_VERSION - 1),
            str(PROTOCOL_VERSION),
        ),
        ({"role": "drafter"}, Expectations(), "drafter", "target"),
        ({}, Expectations(tokenizer_hash="b" * 8), "a" * 8, "b" * 8),
        ({}, Expectations(worker_id="w-2"), "w-1", "w-2"),
    ],
)
async def test_a_mismatch_is_refused_with_both_values(
    changed: dict[str, Any], expected: Expectations, theirs: str, ours: str
) -> None:
    worker = EchoTarget(replace(TARGET, **changed))
    async with stopping(await serve_target(worker)) as server:
        with pytest.raises(ProtocolError) as raised:
            await connect_target(server.address, expected)
        assert theirs in raised.value.message
        assert ours in raised.value.message
        assert server.address in raised.value.message


async def test_a_newer_worker_that_understands_ours_is_connected() -> None:
    newer = replace(TARGET, protocol_version=99, oldest_protocol_version=PROTOCOL_VERSION)
    async with stopping(await serve_target(EchoTarget(newer))) as server:
        _, link = await connect_target(server.address)
        await link.close()


async def test_a_drafter_for_any_vocabulary_is_not_compared() -> None:
    async with stopping(await serve_drafter(EchoDrafter())) as server:
        expected = Expectations(tokenizer_hash="b" * 8)
        description, link = await connect_drafter(server.address, expected)
        assert description.tokenizer_hash == ""
        await link.close()


async def test_another_service_at_the_address_is_a_protocol_error() -> None:
    async with stopping(await serve_drafter(EchoDrafter())) as server:
        with pytest.raises(ProtocolError):
            await connect_target(server.address)


async def test_an_unreachable_address_is_a_worker_error() -> None:
    server = await serve_target(EchoTarget())
    await server.stop(0.0)
    with pytest.raises(WorkerError, match=server.address):
        await connect_target(server.address, timeout_s=5.0)


async def test_a_taken_port_is_a_configuration_error() -> None:
    async with stopping(await serve_target(EchoTarget())) as server:
        with pytest.raises(ConfigError, match=str(server.port)):
            await serve_target(EchoTarget(), port=server.port)


async def test_every_server_answers_health_checks_and_shows_no_services() -> None:
    for starting in (
        serve_target(EchoTarget()),
        serve_drafter(EchoDrafter()),
        serve_coordinator(EchoCoordinator()),
    ):
        server = await starting
        async with stopping(server), grpc.aio.insecure_channel(server.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await anext(aiter(stub.ServerReflectionInfo(iter([request]))))
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
