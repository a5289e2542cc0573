"""How large a body may be, and how it may be compressed: it is never unpacked beyond the bound."""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cluster.errors import RequestError, TooLargeError, UnsupportedCodingError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# What clients are told to send.
CODINGS = "gzip, deflate, zstd"
# One is what clients send.  Each is a whole body that is unpacked.
_MAX_CODINGS = 3
# gzip and zstd may go on with another piece behind the end of one.  A body of nothing but the
# shortest ones would take hours.
_MAX_PIECES = 64
# No larger window is needed to read what is sent over HTTP: RFC 9659.
_WINDOW: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}
_GZIP = (partial(zlib.decompressobj, 16 + zlib.MAX_WBITS),)
# What makes decoders of each coding, to be tried one after the other.  `deflate` has zlib's head by
# its definition (RFC 9110, 8.4.1), and by some clients none.
_DECODERS: dict[str, Sequence[Callable[[], Any]]] = {
    "gzip": _GZIP,
    "x-gzip": _GZIP,
    "deflate": (zlib.decompressobj, partial(zlib.decompressobj, -zlib.MAX_WBITS)),
    "zstd": (partial(zstd.ZstdDecompressor, options=_WINDOW),),
}


def too_large(size: str, max_bytes: int) -> TooLargeError:
    """Return the refusal of a body of that size, in words."""
    return TooLargeError(
        f"the body has {size}, the limit is {max_bytes}; shorten it or raise ingress.max_body_bytes"
    )


def codings_of(headers: Sequence[str]) -> list[str]:
    """Return the codings of a body, in the order in which they were applied, from its
    Content-Encoding headers; raises UnsupportedCodingError."""
    sent = ",".join(headers)
    names = [name.strip() for name in sent.lower().split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if len(names) > _MAX_CODINGS or not _DECODERS.keys() >= set(names):
        raise UnsupportedCodingError(
            f"Content-Encoding: {sent[:80]!r} is not served; send one of {CODINGS}, at most "
            f"{_MAX_CODINGS} of them, or none"
        )
    return names


def unpack(body: bytes, codings: Sequence[str], max_bytes: int) -> bytes:
    """Return the body without its codings.

    Raises TooLargeError for one that is larger then, RequestError for one that is damaged."""
    for name in reversed(codings):
        for make in _DECODERS[name]:
            with contextlib.suppress(zlib.error, zstd.ZstdError, EOFError):
                body = _pieces(make, body, max_bytes)
                break
        else:
            raise RequestError(
                f"the body is damaged, or no {name} of at most {_MAX_PIECES} pieces (in zstd with "
                "a window of at most 8 MiB), which Content-Encoding says it is; compress it anew, "
                "or send it as it is"
            )
    return body


def _pieces(make: Callable[[], Any], body: bytes, max_bytes: int) -> bytes:
    """Return what every piece holds; raises EOFError where the last one does not end."""
    found: bytes = b""
    for _ in range(_MAX_PIECES):
        decoder = make()
        found += decoder.decompress(body, max_bytes + 1 - len(found))
        if len(found) > max_bytes:
            raise too_large(f"more than {max_bytes} bytes", max_bytes)
        body = decoder.unused_data
        if decoder.eof and not body:
            return found
    raise EOFError
