"""Where bodies and answers end: old clients, offers to speak otherwise, damaged requests."""

import asyncio
from pathlib import Path

import pytest
import yaml

from tests.support.deployments.site import ASK, DEADLINE_S, check_refused, rest, site

POST = ASK.replace(b"GET / ", b"POST /echo ")
OLD = b"POST /words HTTP/1.0\r\nContent-Length: 0\r\n"
CHUNKS = b"3\r\nabc\r\n0\r\n\r\n"
CLOSE = b"Connection: close\r\n"
LENGTH, CHUNKED = b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n"
FRAMES = yaml.safe_load(Path(__file__).with_name("framing.yaml").read_text("utf-8"))


@pytest.mark.parametrize("wish", [b"", b"Connection: keep-alive\r\n", CLOSE])
async def test_to_an_old_client_the_end_of_the_connection_is_that_of_a_stream(wish: bytes):
    async with site() as place:
        reader, _ = await place.connect(OLD + wish + b"\r\n")
        async with asyncio.timeout(DEADLINE_S):
            head, first = await reader.readuntil(b"\r\n\r\n"), await reader.readexactly(4)
        assert head.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        assert first == b"one "
        place.application.may_answer.set()
        assert await rest(reader) == b"two"


async def test_an_old_client_gets_the_length_of_an_answer_that_has_one():
    ask = b"POST /echo HTTP/1.0\r\nExpect: 100-continue\r\n" + LENGTH + b"\r\nabc"
    async with site() as place:
        head, _, body = (await place.answer(ask)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")  # it knows no 100 Continue
        assert b"content-length: 3" in head
        assert body == b"abc"
        place.application.may_answer.set()
        head = (await place.answer(OLD.replace(b"POST", b"HEAD") + b"\r\n")).lower()
        assert b"chunked" not in head


BODIES = {"of a length": LENGTH + b"\r\nabc", "in chunks": CHUNKED + b"\r\n" + CHUNKS}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("offer", FRAMES["offers"].values(), ids=FRAMES["offers"])
async def test_an_offer_to_speak_otherwise_is_not_taken_and_the_body_is_read(
    offer: str, body: bytes
):
    last = POST + CLOSE + LENGTH + b"\r\nxyz"
    async with site() as place:
        answer = await place.answer(POST + offer.encode() + body + last)
        assert answer.count(b"HTTP/1.1 200 ") == 2
        assert b"\r\n\r\nabcHTTP/1.1" in answer
        assert answer.endswith(b"xyz")
        assert b"upgrade:" not in answer.lower()


@pytest.mark.parametrize("wish", [b"Upgrade, HTTP2-Settings, close", b"close, Upgrade"])
async def test_an_offer_on_a_connection_that_is_to_close_is_answered(wish: bytes):
    ask = POST + b"Connection: " + wish + b"\r\nUpgrade: h2c\r\n" + LENGTH + b"\r\nabc"
    async with site() as place:
        answer = await place.answer(ask)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"\r\n\r\nabc")


async def test_the_body_behind_an_offer_may_come_later_and_byte_by_byte():
    ask = POST + FRAMES["offers"]["h2c"].encode() + BODIES["of a length"]
    async with site() as place:
        reader, writer = await place.connect()
        for byte in ask:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S):
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(3) == b"abc"


async def test_a_proxy_is_what_nobody_finds_here():
    async with site() as place:
        check_refused(
            await place.answer(b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n"), 400, "valid HTTP"
        )


@pytest.mark.parametrize("rest_of_it", FRAMES["refused"].values(), ids=FRAMES["refused"])
async def test_a_body_whose_end_nobody_knows_is_answered_and_the_connection_closed(
    rest_of_it: str,
):
    async with site() as place:
        answer = await place.answer(POST + rest_of_it.encode())
        check_refused(answer, 400, "valid HTTP|Transfer-Encoding")
        assert await place.is_served()


async def test_chunks_from_a_client_of_an_age_that_knew_none_are_refused():
    async with site() as place:
        ask = b"POST /echo HTTP/1.0\r\n" + CHUNKED + b"\r\n" + CHUNKS
        check_refused(await place.answer(ask), 400, "Transfer-Encoding")


async def test_what_reads_a_damaged_body_learns_that_its_client_is_gone():
    async with site() as place:
        reader, writer = await place.connect(POST + CHUNKED + b"\r\n3\r\nabc\r\n")
        await place.application.is_asked.wait()
        writer.write(b"zz\r\n")
        check_refused(await rest(reader), 400, "valid HTTP")
        async with asyncio.timeout(DEADLINE_S):
            await place.application.is_left.wait()


async def test_what_answers_learns_that_its_client_is_gone_though_more_was_asked():
    ask = ASK.replace(b"/ ", b"/words ") + b"\r\n" + ASK + b"\r\n"
    async with site() as place:
        reader, writer = await place.connect(ask)
        await reader.readexactly(1)
        writer.close()
        async with asyncio.timeout(DEADLINE_S):
            await place.application.is_left.wait()


async def test_a_damaged_request_behind_one_that_is_answered_ends_both():
    """An answer of its own would be taken for that of the first."""
    async with site() as place:
        reader, writer = await place.connect(ASK.replace(b"/ ", b"/slow ") + b"\r\n")
        await place.application.is_asked.wait()
        writer.write(POST + FRAMES["refused"]["a size that is none"].encode())
        assert await rest(reader) == b""
        assert await place.is_served()
