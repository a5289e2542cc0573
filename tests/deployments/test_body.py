"""Request bodies: limits of size and time, and where they are parsed."""

import asyncio
import gzip
import json
import logging
import secrets
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request

from cluster.config.schema import IngressConfig
from cluster.errors import TooLargeError, TooSlowError, UnsupportedCodingError
from deployments.ingress.api.messages import error_body as messages_error
from deployments.ingress.body import error_response, hidden, read_object
from tests.deployments.test_openai_request import CONFIG, LIMITS
from tests.support.errors import request_error

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

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


async def read(asked: Request, settings: IngressConfig = PATIENT) -> Any:
    limits = replace(LIMITS, config=replace(CONFIG, ingress=settings))
    return await read_object(asked, limits, lambda values, _: values)


async def test_a_body_in_pieces_is_one_object():
    assert await read(request(b'{"a"', b": 1}")) == {"a": 1}


async def test_a_body_that_does_not_arrive_in_time_frees_its_slot():
    hasty = IngressConfig(body_timeout_s=0.05)
    with pytest.raises(TooSlowError, match=r"within 0.05 s.*ingress.body_timeout_s"):
        await read(request(b'{"a"', is_whole=False), hasty)


async def test_a_body_with_a_too_large_content_length_is_refused_unread():
    headers = [(b"content-length", b"1000001")]
    with pytest.raises(TooLargeError, match="1000001 bytes"):
        await read(request(is_whole=False, headers=headers))


async def test_a_large_body_is_parsed_and_checked_in_another_thread():
    def thread(*asked: Any) -> threading.Thread:
        return threading.current_thread()

    assert await read_object(request(b"{}"), LIMITS, thread) is threading.main_thread()
    large = b'{"a": "%s"}' % (b"x" * 200_000)
    assert await read_object(request(large), LIMITS, thread) is not threading.main_thread()


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def in_two(pack: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: pack(data[:7]) + pack(data[7:])


PACKED = {
    "gzip": ("gzip", gzip.compress),
    "the old name": ("X-GZip", gzip.compress),
    "two members": ("gzip", in_two(gzip.compress)),
    "deflate": ("deflate", zlib.compress),
    "deflate without a head": ("deflate", raw_deflate),
    "zstd": ("zstd", zstd.compress),
    "two frames": ("zstd", in_two(zstd.compress)),
    "nothing": ("identity", bytes),
    "a list": ("deflate , gzip,identity", lambda data: gzip.compress(zlib.compress(data))),
    "two headers": ("gzip|zstd", lambda data: zstd.compress(gzip.compress(data))),
}


def packed(coding: str, body: bytes, **how: Any) -> Request:
    headers = [(b"content-encoding", line.encode()) for line in coding.split("|")]
    return request(body[:5], body[5:], headers=headers, **how)


@pytest.mark.parametrize(("coding", "pack"), PACKED.values(), ids=PACKED)
async def test_a_compressed_body_is_unpacked(coding: str, pack: Callable[[bytes], bytes]):
    values = {"prompt": secrets.token_hex(1000)}
    body = pack(json.dumps(values).encode())
    assert await read(packed(coding, body)) == values


@pytest.mark.parametrize(
    ("coding", "pack"), [each for each in PACKED.values() if each[0] != "identity"]
)
async def test_a_bomb_is_refused_before_it_is_whole(coding: str, pack: Callable[[bytes], bytes]):
    """Also one that unpacks to the next bomb."""
    body = pack(b'{"a": "' + bytes(50_000_000) + b'"}')
    tracemalloc.start()
    with pytest.raises(TooLargeError, match=r"more than 1000000 bytes.*max_body_bytes"):
        await read(packed(coding, body))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10_000_000


async def test_a_body_of_the_largest_size_is_taken_and_one_byte_more_is_not():
    limits = IngressConfig(max_body_bytes=1000)
    for coding, pack in PACKED.values():
        whole = b'{"a": "%s"}' % (b"x" * 992)
        assert len(whole) == 1001
        body = pack(whole.replace(b"x", b"", 1))
        assert await read(packed(coding, body), limits)
        with pytest.raises(TooLargeError):
            await read(packed(coding, pack(whole)), limits)


DAMAGED = {
    "empty": lambda body: b"",
    "cut off": lambda body: body[:-1],
    "cut off early": lambda body: body[:4],
    "not compressed": lambda body: b'{"a": 1}',
    "another byte": lambda body: body[:-6] + bytes([body[-6] ^ 255]) + body[-5:],
    "more behind it": lambda body: body + b"more",
    "no end of empty members": lambda body: body * 1000,
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
async def test_a_damaged_compressed_body_is_the_clients_fault(
    coding: str, damage: Callable[[bytes], bytes]
):
    pack = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress}[coding]
    with request_error(f"damaged, or no {coding} .*Content-Encoding") as caught:
        await read(packed(coding, damage(pack(b""))))
    assert error_response(caught.value, "").status_code == 400


async def test_a_zstd_body_takes_no_more_memory_than_its_window_may():
    options = {zstd.CompressionParameter.window_log: 27}
    packer = zstd.ZstdCompressor(options=options)
    body = packer.compress(b'{"a": 1}') + packer.flush()
    with request_error("a window of at most 8 MiB"):
        await read(packed("zstd", body))


@pytest.mark.parametrize("coding", ["br", "compress", "gzip, br", "gzip, gzip, gzip, gzip", "ü"])
async def test_an_unknown_coding_is_refused_unread_and_told_what_is_taken(coding: str):
    headers = [(b"content-encoding", coding.encode("latin-1"))]
    with pytest.raises(UnsupportedCodingError, match="Content-Encoding: ") as caught:
        await read(request(is_whole=False, headers=headers))
    answer = error_response(caught.value, "")
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"
    assert json.loads(messages_error(caught.value, ""))["error"]["type"] == "invalid_request_error"


def endless(depth: int) -> int:
    return endless(depth + 1) + 1 if depth < 10**6 else 0


def test_an_endless_recursion_writes_some_lines_and_no_text(
    caplog: pytest.LogCaptureFixture,
):
    """Of a bug of ours."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(RecursionError) as caught:
        endless(0)
    caught.value.args = ("what the prompt said",)
    error = hidden(caught.value, "mine-7")
    assert "unexpected RecursionError id=mine-7" in caplog.text
    assert "in endless" in caplog.text
    assert len(caplog.text.splitlines()) < 60
    assert "what the prompt said" not in caplog.text + error.message
