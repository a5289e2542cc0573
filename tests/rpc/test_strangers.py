"""Whoever has no right to call is refused before a handler runs, and nobody else notices."""

import asyncio
import contextlib
import functools
import itertools
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.errors import DrafthouseError, ProtocolError, WorkerError
from cluster.rpc.options import MAX_CALLS
from cluster.rpc.server import serve_worker
from cluster.rpc.trust import Trust
from tests.support.choices import by_day
from tests.support.errors import config_error
from tests.support.rpc.certificates import Authority
from tests.support.rpc.servers import (
    KINDS,
    OTHER_SECRET,
    PATIENCE_S,
    SECRET,
    Kind,
    answered,
    trusting,
)
from tests.support.rpc.toys import EchoTarget

TRUSTED = trusting(SECRET)
NUM_STREAMS = 4
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
# What does not depend on the kind; a drafter has a key of its own.
kinds = pytest.mark.parametrize("kind", by_day([KINDS["drafter"]], [*KINDS.values()]))


async def status(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call ends, which must be soon."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else call.read())
            await call.code()
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return await call.code(), await call.details()


@every_kind
async def test_a_call_without_a_token_reaches_no_handler(kind: Kind):
    methods = ["Describe", "", "Metrics", "Status", "Absent"]
    async with kind.running(TRUSTED) as server, server.neighbour(TRUSTED), server.raw() as channel:
        for name in methods:
            # As a stream: one that never sends a request is refused as well.
            code, details = await status(channel.stream_stream(server.method(name))())
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert "data_plane.secret_file" in details
        code, _ = await status(channel.stream_stream("/grpc.health.v1.Health/Watch")())
        assert code is grpc.StatusCode.UNAUTHENTICATED
        probe = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert (await probe).status == health_pb2.HealthCheckResponse.SERVING


@kinds
async def test_a_token_that_was_seen_on_the_wire_opens_nothing_again(kind: Kind):
    async with kind.running(TRUSTED) as server, server.neighbour(TRUSTED), server.raw() as channel:
        method = server.method()
        seen = server.token(TRUSTED, method)
        first = channel.stream_stream(method)(metadata=seen)
        await first.initial_metadata()
        assert not first.done()
        code, details = await status(channel.stream_stream(method)(metadata=seen))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert "used before" in details
        first.cancel()


async def test_nobody_but_this_machine_reaches_a_server_without_a_secret():
    with config_error(r"data_plane.secret_file: others reach 0\.0\.0\.0"):
        await serve_worker(EchoTarget(), "0.0.0.0")


async def test_a_server_without_its_key_does_not_start():
    key_of_other = f"key:drafter other:{'0' * 64}"
    with config_error("holds no key of target"):
        await serve_worker(EchoTarget(), trust=trusting(key_of_other))


@kinds
async def test_a_secret_is_replaced_under_open_streams(kind: Kind):
    present = [SECRET]
    trust = Trust(lambda: tuple(present))
    async with kind.running(trust) as server:
        links = [await server.link(trust) for _ in range(NUM_STREAMS)]
        old = trusting(SECRET)
        for lines in ([SECRET, OTHER_SECRET], [OTHER_SECRET, SECRET], [OTHER_SECRET]):
            present[:] = lines
            for number, link in enumerate(links):
                await answered(kind, link, number)
            if SECRET in lines:  # a part that has not read the new file yet
                await (await server.link(old)).close()
            await (await server.link(trust)).close()
        with pytest.raises(ProtocolError, match=rf"{server.address}.*data_plane\.secret"):
            await server.link(old)
        for link in links:
            await link.close()


def named(authority: Authority, folder: Path, role: str) -> Trust:
    """What a process shows whose certificate, in that folder, names this role."""
    authority.write(folder, f"{role}.drafthouse")
    return trusting(SECRET, folder=folder, role=role)


def certified(root: Path, kind: Kind) -> tuple[Authority, Trust, Trust]:
    """Who signs, and what a server and its caller are given, in folders with their roles' names."""
    authority = Authority.new()
    roles = kind.service.role, kind.service.caller
    server, caller = (named(authority, root / role, role) for role in roles)
    return authority, server, caller


@kinds
async def test_who_shows_no_valid_certificate_is_refused(kind: Kind, tmp_path: Path):
    authority, serving, calling = certified(tmp_path, kind)
    caller = f"{kind.service.caller}.drafthouse"
    expired = authority.write(tmp_path / "expired", caller, days=-1)
    foreign = Authority.new("another").write(tmp_path / "foreign", caller)
    async with kind.running(serving) as server, server.neighbour(calling):
        strangers = [
            trusting(SECRET, folder=folder, role=kind.service.caller)
            for folder in (expired, foreign)
        ]
        for trust in (TRUSTED, *strangers):
            with pytest.raises(WorkerError, match=r"data_plane\.tls"):
                await server.link(trust)


async def test_only_an_ingress_may_watch(tmp_path: Path):
    kind = KINDS["coordinator"]
    authority, serving, calling = certified(tmp_path, kind)
    foreign = named(authority, tmp_path / "drafter", "drafter")
    async with kind.running(serving) as server:
        link = await server.link(calling)
        async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(link.watch()) as events:
            assert await anext(events) == ("rounds", "0")
        await link.close()
        method = server.method("Watch")
        async with foreign.channel(server.address, kind.service.role, []) as channel:
            metadata = server.token(foreign, method)
            code, _ = await status(channel.unary_stream(method)(b"", metadata=metadata))
    assert code is grpc.StatusCode.PERMISSION_DENIED


@every_kind
async def test_a_certificate_of_another_role_is_refused(kind: Kind, tmp_path: Path):
    authority, serving, calling = certified(tmp_path, kind)
    roles = {"ingress", "coordinator", "target", "drafter"} - {kind.service.caller}
    async with kind.running(serving) as server, server.neighbour(calling):
        for role in roles:
            stranger = named(authority, tmp_path / "strangers" / role, role)
            told = rf"{role}\.drafthouse; {kind.service.caller}\.drafthouse alone"
            with pytest.raises(ProtocolError, match=told):
                await server.link(stranger)
    # Nor may a server be of another role than the one that is called.
    async with kind.running(named(authority, tmp_path / "wrong", "ingress")) as server:
        with pytest.raises(DrafthouseError, match=r"data_plane\.tls"):
            await server.link(calling)


async def test_a_tls_caller_of_a_plain_server_is_told_so(tmp_path: Path):
    kind = KINDS["target"]
    _, _, calling = certified(tmp_path, kind)
    async with kind.running(TRUSTED) as server:
        with pytest.raises(WorkerError, match=r"data_plane\.tls"):
            await server.link(calling)


@kinds
async def test_certificates_are_replaced_under_open_streams(kind: Kind, tmp_path: Path):
    authority, serving, calling = certified(tmp_path, kind)
    async with kind.running(serving) as server:
        links = [await server.link(calling) for _ in range(NUM_STREAMS)]
        for issuer in (authority, Authority.new("its successor")):
            for role in (kind.service.role, kind.service.caller):
                issuer.write(tmp_path / role, f"{role}.drafthouse")
            for number, link in enumerate(links):
                await answered(kind, link, number)
            await (await server.link(calling)).close()
        for link in links:
            await link.close()


@kinds
async def test_what_swells_or_is_too_long_is_refused(kind: Kind):
    async with kind.running(TRUSTED) as server, server.neighbour(TRUSTED):
        method = server.method("Describe")
        bomb, long_name = bytes(64 * 2**20), ("long", "x" * 20_000)
        token = functools.partial(server.token, TRUSTED, method, "")
        async with server.raw(("grpc.max_send_message_length", -1)) as channel:
            call = channel.unary_unary(method)
            bombing = call(bomb, metadata=token(), compression=grpc.Compression.Gzip)
            assert (await status(bombing))[0] is grpc.StatusCode.UNIMPLEMENTED
            too_long = await status(call(bomb, metadata=token()))
            assert too_long[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            for metadata in ((long_name,), (*token(), long_name)):
                code, details = await status(call(b"", metadata=metadata))
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "metadata" in details


async def test_calls_beyond_the_limit_are_refused():
    kind = KINDS["target"]
    async with kind.running(TRUSTED) as server, server.neighbour(TRUSTED):
        method = server.method()
        async with server.raw() as one, server.raw() as other:
            held = []
            for channel in itertools.cycle((one, other)):
                call = channel.stream_stream(method)(metadata=server.token(TRUSTED, method))
                held.append(call)
                await call.initial_metadata()
                if call.done():
                    break
                assert len(held) < MAX_CALLS
            assert await held[-1].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            # The neighbour's stream is the one that is missing.
            assert len(held) == MAX_CALLS
            for call in held:
                call.cancel()


def frame(kind: int, payload: bytes) -> bytes:
    """A frame of HTTP/2, of the connection itself."""
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload


@pytest.mark.parametrize(
    "sent",
    [b"", HELLO + frame(4, b"") + 64 * frame(6, bytes(8))],
    ids=["says nothing", "pings without an end"],
)
async def test_a_connection_without_calls_is_closed(sent: bytes):
    async with KINDS["target"].running(TRUSTED) as server, server.neighbour(TRUSTED):
        host, port = server.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        async with asyncio.timeout(PATIENCE_S):
            last_words = await reader.read()
        assert last_words.endswith((b"before handshake timeout", b"too_many_pings"))
        writer.close()
