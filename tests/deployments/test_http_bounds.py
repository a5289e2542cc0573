"""What a client may send before a request, how slowly, and on how many connections."""

import asyncio
import socket

import pytest

from tests.support.deployments.site import (
    ASK,
    DEADLINE_S,
    check_refused,
    rest,
    site,
)

BRIEF_S = 0.3
SLOW = ASK.replace(b"/ ", b"/slow ") + b"Connection: close\r\n\r\n"


HEADS = {
    "whole": ASK + b"X: " + b"a" * 3000 + b"\r\n\r\n",
    "without an end": ASK + b"X: " + b"a" * 400_000,
    "in many headers": ASK + b"".join(b"X%d: aaaaaaaaaaaaaaaa\r\n" % i for i in range(200)),
    "a path": b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "a path without an end": b"GET /" + b"a" * 400_000,
    "headers in number": ASK + b"".join(b"X: a\r\n" for _ in range(40)) + b"\r\n",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
async def test_a_head_beyond_the_bounds_is_refused_and_others_are_served(head: bytes):
    async with site(max_header_bytes=2048, max_headers=32) as place:
        check_refused(await place.answer(head), 431, r"http\.max_header|does not end")
        assert await place.is_served()


async def test_headers_behind_a_body_count_too():
    ask = b"POST /slow HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    async with site(max_header_bytes=2048) as place:
        for more in (b"X: " + b"a" * 400_000, b"".join(b"X: aaaaaaaa\r\n" for _ in range(200))):
            check_refused(await place.answer(ask + more), 431, r"http\.max_header|does not end")
        assert await place.is_served()


async def test_a_large_body_counts_as_no_head():
    ask = ASK.replace(b"GET", b"POST") + b"Content-Length: 300000\r\n"
    async with site(max_header_bytes=2048) as place:
        answer = await place.answer(ask + b"Connection: close\r\n\r\n" + bytes(300_000))
        assert answer.startswith(b"HTTP/1.1 200")


async def test_what_is_no_http_is_refused_in_shape():
    async with site() as place:
        check_refused(
            await place.answer(b"\x16\x03\x01\x02\x00\x01\r\n\r\n"), 400, "no.* valid HTTP"
        )


async def test_a_head_that_trickles_is_refused_and_others_are_served():
    async with site(head_timeout_s=BRIEF_S) as place:
        reader, writer = await place.connect(ASK)
        answer = asyncio.create_task(rest(reader))
        while not answer.done():
            writer.write(b"X: a\r\n")
            await asyncio.sleep(0.02)
            assert await place.is_served()
        check_refused(answer.result(), 408, r"within 0\.3 s.*http\.head_timeout_s")


async def test_a_connection_that_sends_nothing_is_closed():
    async with site(head_timeout_s=BRIEF_S) as place:
        check_refused(await place.answer(b""), 408, "have not arrived")


@pytest.mark.parametrize("drop", [b"\r\n", b"x"], ids=["line breaks", "a body"])
async def test_what_trickles_after_an_answer_keeps_no_connection(drop: bytes):
    """Each byte would put off the end of an idle connection."""
    ask = ASK + (b"Content-Length: 99999\r\n\r\n" if drop == b"x" else b"\r\n")
    async with site(head_timeout_s=BRIEF_S) as place:
        reader, writer = await place.connect(ask)
        answer = asyncio.create_task(rest(reader))
        while not answer.done():
            writer.write(drop)
            await asyncio.sleep(0.02)
        assert answer.result().endswith(b"here")


async def test_an_idle_connection_is_closed():
    async with site(keep_alive_s=1) as place:
        assert (await place.answer(ASK + b"\r\n")).endswith(b"here")


async def test_an_answer_may_take_longer_than_a_head():
    async with site(head_timeout_s=0.1) as place:
        reader, _ = await place.connect(SLOW)
        await asyncio.sleep(0.4)
        place.application.may_answer.set()
        assert (await rest(reader)).endswith(b"late")


async def test_connections_without_a_request_make_room_for_others():
    """Many that never ask (a slow loris) keep nobody out."""
    async with site(max_connections=8) as place:
        silent = [await place.connect(ASK) for _ in range(40)]
        for _ in range(10):
            assert await place.is_served()
        check_refused(await rest(silent[0][0]), 503, "8 connections are open")


async def test_one_connection_too_many_is_refused_where_all_have_a_request():
    async with site(max_connections=1) as place:
        reader, _ = await place.connect(SLOW)
        await place.application.is_asked.wait()
        answer = await place.answer(ASK + b"\r\n")
        check_refused(answer, 503, "1 connections are open")
        assert b"retry-after: 1" in answer
        place.application.may_answer.set()
        assert (await rest(reader)).endswith(b"late")
        assert await place.is_served()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
async def test_a_client_that_never_reads_is_cut_off():
    async with site(unread_timeout_s=1) as place:
        reader, writer = await place.connect(ASK.replace(b"/ ", b"/endless ") + b"\r\n")
        await reader.readexactly(1)
        writer.transport.pause_reading()
        async with asyncio.timeout(DEADLINE_S):
            await place.application.is_left.wait()
