"""How large a body may be, and how it may be compressed: it is never unpacked beyond the bound."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cluster.errors import RequestError, TooLargeError, UnsupportedCodingError

# What clients may send, and are told to.
CODINGS = ("gzip", "deflate", "zstd")
# As other names of the same (RFC 9110, 8.4.1); and what leaves a body as it is.
_ALIASES = {"x-gzip": "gzip", "identity": ""}
# One is what clients send.  Each is a whole body that is unpacked.
_MAX_CODINGS = 3
# gzip and zstd may go on with another piece behind the end of one.  A body of nothing but the
# shortest ones would take hours.
_MAX_PIECES = 64
_GZIP, _RAW = 16 + zlib.MAX_WBITS, -zlib.MAX_WBITS
# No larger window is needed to read what is sent over HTTP: RFC 9659.
_WINDOW_LOG = 23


def too_large(size: str, max_bytes: int) -> TooLargeError:
    """Return the refusal of a body of that size, in words."""
    return TooLargeError(
        f"the body has {size}, the limit is {max_bytes}; shorten it or raise ingress.max_body_bytes"
    )


def codings_of(headers: Sequence[str]) -> list[str]:
    """Return the codings of a body, in the order in which they were applied, from its
    Content-Encoding headers; raises UnsupportedCodingError."""
    names = [name.strip().lower() for header in headers for name in header.split(",")]
    names = list(filter(None, (_ALIASES.get(name, name) for name in names)))
    if len(names) > _MAX_CODINGS:
        raise UnsupportedCodingError(
            f"Content-Encoding: there are {len(names)} codings, the limit is {_MAX_CODINGS}; "
            "compress the body once"
        )
    for name in names:
        if name not in CODINGS:
            raise UnsupportedCodingError(
                f"Content-Encoding: {name[:40]!r} is not served; send {', '.join(CODINGS)} or none"
            )
    return names


def unpack(body: bytes, codings: Sequence[str], max_bytes: int) -> bytes:
    """Return the body without its codings.

    Raises TooLargeError for one that is larger then, RequestError for one that is damaged."""
    for name in reversed(codings):
        body = _without(name, body, max_bytes)
    return body


def _without(name: str, body: bytes, max_bytes: int) -> bytes:
    decoders, failure = _decoders(name)
    for decoder in decoders:
        try:
            return _pieces(decoder, body, max_bytes)
        except (failure, EOFError):
            continue
    raise RequestError(
        f"the body is damaged, or no {name} of at most {_MAX_PIECES} pieces (in zstd with a window "
        "of at most 8 MiB), which Content-Encoding says it is; compress it anew, or send it as it "
        "is"
    )


def _decoders(name: str) -> tuple[Sequence[Callable[[], Any]], type[Exception]]:
    """Return what makes decoders of a coding, to be tried one after the other, and how they fail.

    They are alike: see zlib.decompressobj."""
    if name == "zstd":
        # Few send it.
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
        options = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
        return (partial(zstd.ZstdDecompressor, options=options),), zstd.ZstdError
    # `deflate` has zlib's head by its definition, and by some clients none.
    windows = (_GZIP,) if name == "gzip" else (zlib.MAX_WBITS, _RAW)
    return [partial(zlib.decompressobj, bits) for bits in windows], zlib.error


def _pieces(make: Callable[[], Any], body: bytes, max_bytes: int) -> bytes:
    """Return what every piece holds; raises EOFError where the last one does not end."""
    found = b""
    for _ in range(_MAX_PIECES):
        decoder = make()
        found += decoder.decompress(body, max_bytes + 1 - len(found))
        if len(found) > max_bytes:
            raise too_large(f"more than {max_bytes} bytes", max_bytes)
        if not decoder.eof:
            break
        body = decoder.unused_data
        if not body:
            return found
    raise EOFError
