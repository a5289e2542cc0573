"""Connecting refuses mismatched workers; servers answer no reflection."""

from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.errors import ConfigError, ProtocolError, WorkerError
from cluster.rpc import conversations as talk
from cluster.rpc.channel import connect_drafter, connect_target
from cluster.rpc.messages import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from cluster.rpc.server import serve_worker
from tests.support.rpc.servers import KINDS, Kind
from tests.support.rpc.toys import TARGET, EchoDrafter, EchoTarget, stopping


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_an_expected_worker_is_connected(host: str):
    newer = replace(TARGET, protocol_version=99, oldest_protocol_version=PROTOCOL_VERSION)
    async with stopping(await serve_worker(EchoTarget(newer), host)) as server:
        told = {"worker_id": TARGET.worker_id, "tokenizer_hash": TARGET.tokenizer_hash}
        _, link = await connect_target(server.address, **told)
        await link.close()


NEWER = {"protocol_version": 99, "oldest_protocol_version": 98}
OLDER = {"protocol_version": OLDEST_PROTOCOL_VERSION - 1}


@pytest.mark.parametrize(
    ("changed", "expected", "theirs", "ours"),
    [
        (NEWER, {}, "99", str(PROTOCOL_VERSION)),
        ({**NEWER, "oldest_protocol_version": 0}, {}, "99", str(PROTOCOL_VERSION)),
        (OLDER, {}, str(OLDEST_PROTOCOL_VERSION - 1), str(PROTOCOL_VERSION)),
        ({"role": "drafter"}, {}, "drafter", "target"),
        ({}, {"tokenizer_hash": "b" * 8}, "a" * 8, "b" * 8),
        ({}, {"worker_id": "w-2"}, "w-1", "w-2"),
    ],
)
async def test_a_mismatch_is_refused_with_both_values(
    changed: dict[str, Any], expected: dict[str, str], theirs: str, ours: str
):
    worker = EchoTarget(replace(TARGET, **changed))
    async with stopping(await serve_worker(worker, service=talk.TARGET)) as server:
        with pytest.raises(ProtocolError) as raised:
            await connect_target(server.address, **expected)
        assert theirs in raised.value.message
        assert ours in raised.value.message
        assert server.address in raised.value.message


async def test_a_drafter_for_any_vocabulary_is_not_compared_and_is_no_target():
    async with stopping(await serve_worker(EchoDrafter())) as server:
        description, link = await connect_drafter(server.address, tokenizer_hash="b" * 8)
        assert description.tokenizer_hash == ""
        await link.close()
        with pytest.raises(ProtocolError):
            await connect_target(server.address)


async def test_an_unreachable_address_is_a_worker_error():
    server = await serve_worker(EchoTarget())
    await server.stop(0.0)
    with pytest.raises(WorkerError, match=server.address):
        await connect_target(server.address)


async def test_a_taken_port_is_a_configuration_error():
    async with stopping(await serve_worker(EchoTarget())) as server:
        with pytest.raises(ConfigError, match=str(server.port)):
            await serve_worker(EchoTarget(), port=server.port)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_no_server_shows_its_services(kind: Kind):
    async with kind.running() as server, server.raw() as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await anext(aiter(stub.ServerReflectionInfo(iter([request]))))
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
