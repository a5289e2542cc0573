"""Request bodies: limits of size and time, and where they are parsed."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import Request

from cluster.config.schema import IngressConfig
from cluster.errors import RequestError, TooLargeError, TooSlowError
from deployments.ingress.body import read_object

PATIENT = IngressConfig(max_body_bytes=1_000_000)


def request(*chunks: bytes, is_whole: bool = True, headers: Sequence[Any] = ()) -> Request:
    """A request whose body arrives in `chunks`; without the last one, reading waits."""
    left = list(chunks)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        body = left.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(left) or not is_whole}

    return Request({"type": "http", "headers": list(headers)}, receive)


def same(values: dict[str, Any]) -> dict[str, Any]:
    return values


async def test_a_compressed_body_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(100_000_000))
    headers = [(b"content-encoding", b"gzip")]
    with pytest.raises(RequestError, match="not valid UTF-8"):
        await read_object(request(bomb, headers=headers), PATIENT, same)


async def test_a_body_in_pieces_is_one_object() -> None:
    assert await read_object(request(b'{"a"', b": 1}"), PATIENT, same) == {"a": 1}


async def test_a_body_that_does_not_arrive_in_time_frees_its_slot() -> None:
    hasty = IngressConfig(body_timeout_s=0.05)
    with pytest.raises(TooSlowError, match=r"within 0.05 s.*ingress.body_timeout_s"):
        await read_object(request(b'{"a"', is_whole=False), hasty, same)


async def test_a_body_with_a_too_large_content_length_is_refused_unread() -> None:
    headers = [(b"content-length", b"1000001")]
    with pytest.raises(TooLargeError, match="1000001 bytes"):
        await read_object(request(is_whole=False, headers=headers), PATIENT, same)


async def test_a_large_body_is_parsed_and_checked_in_another_thread() -> None:
    def thread(values: dict[str, Any]) -> threading.Thread:
        return threading.current_thread()

    assert await read_object(request(b"{}"), PATIENT, thread) is threading.main_thread()
    large = b'{"a": "%s"}' % (b"x" * 200_000)
    assert await read_object(request(large), PATIENT, thread) is not threading.main_thread()
