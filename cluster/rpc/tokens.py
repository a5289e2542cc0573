"""Tokens by which a caller proves that it holds the key of the server it calls.

A key belongs to one service: the targets, the coordinators, or the drafters of one name.  All are
derived from the cluster's secret (HKDF, RFC 5869), and a key says nothing of the secret or of
another key.  So a drafter that others wrote is given its own key and nothing more:

    python -m cluster.rpc.tokens SECRET_FILE "drafter NAME" > KEY_FILE

A token is made for one call: `v1.TIME.NONCE.MAC`, with the time in seconds since 1970 and
MAC = HMAC-SHA256(key, METHOD "\\n" WORKER "\\n" TIME "\\n" NONCE) in hexadecimal digits.  METHOD is
the full name, "/package.Service/Method".  WORKER is the `worker_id` that the server's Describe has
answered with, and empty for Describe.
"""

from __future__ import annotations

import functools
import hmac
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from cluster.config.pem import Reloaded
from cluster.errors import ConfigError, reason_of

HEADER = "drafthouse-token"
MIN_SECRET_LEN = 32
# Clocks that NTP keeps differ by milliseconds, and a caller that was stopped for a while tries
# again.  More would only be time for whoever has seen a token, and nonces to remember.
MAX_SKEW_S = 60.0

# The secrets as they are now, newest first.  Each is a line of a file.
Secrets = Callable[[], Sequence[str]]
Metadata = tuple[tuple[str, str], ...]

_TOKEN = re.compile(r"v1\.(?P<time>\d{1,12})\.(?P<nonce>[0-9a-f]{32})\.(?P<mac>[0-9a-f]{64})")
_DERIVED = re.compile(r"key:(?P<service>.+):(?P<key>[0-9a-f]{64})")
_SALT = b"drafthouse data plane"
_REMEDY = "give both sides the same data_plane.secret_file (docs/data-plane.md)"


def secrets_of(path: str) -> Secrets:
    """Return the secrets of a file, which is read anew when it has changed.

    Raises ConfigError for a file without any, and for one that is too short.
    """
    return Reloaded([path], functools.partial(_read, path)).get


def _read(path: str) -> tuple[str, ...]:
    place = "data_plane.secret_file"
    try:
        with open(path, encoding="utf-8") as file:
            lines = tuple(filter(None, map(str.strip, file)))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.at(place, f"{path} cannot be read ({reason_of(error)})") from error
    if not lines or any(len(line) < MIN_SECRET_LEN for line in lines):
        raise ConfigError.at(
            place,
            f"{path} needs {MIN_SECRET_LEN} or more characters in each line, and a line; "
            "`openssl rand -hex 32` prints such a one",
        )
    return lines


def derive(secret: str, service: str) -> bytes | None:
    """Return the key of a service, None where `secret` is the key of another one."""
    if derived := _DERIVED.fullmatch(secret):
        return bytes.fromhex(derived["key"]) if derived["service"] == service else None
    extracted = hmac.digest(_SALT, secret.encode(), "sha256")
    # One block is as long as the key.
    return hmac.digest(extracted, service.encode() + b"\x01", "sha256")


class ServiceKeys:
    """The keys of one service, as long as there are secrets to derive them from."""

    def __init__(self, of_now: Secrets, service: str) -> None:
        self.service = service
        self._of_now = of_now

    def get(self) -> tuple[bytes, ...]:
        """The keys that are accepted; calls are signed by the first."""
        return tuple(filter(None, (derive(line, self.service) for line in self._of_now())))

    def sign(self, method: str, worker: str, now: float | None = None) -> Metadata:
        """Return the metadata of one call; none without a key."""
        keys = self.get()
        if not keys:
            return ()
        said = f"{int(time.time() if now is None else now)}", secrets.token_hex(16)
        return ((HEADER, ".".join(("v1", *said, _mac(keys[0], method, worker, *said)))),)


class TokenCheck:
    """Tells calls with a good token from others; each token is good once."""

    def __init__(
        self, keys: ServiceKeys, worker: str, clock: Callable[[], float] = time.time
    ) -> None:
        """worker: the id with which this process describes itself."""
        self._keys = keys
        self._worker = worker
        self._clock = clock
        self._seen: dict[str, float] = {}  # nonces of good tokens, oldest first

    def refusal(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """Return the reason to refuse a call; "" = its token is good."""
        service = self._keys.service
        sent = next((value for key, value in metadata if key == HEADER), None)
        if sent is None:
            return f"no {HEADER} came with the call; {service} asks for one, so {_REMEDY}"
        token = _TOKEN.fullmatch(str(sent))
        if token is None:
            return f"the {HEADER} has another form; run the same release on both sides"
        worker = "" if method.endswith("/Describe") else self._worker
        said = token["time"], token["nonce"]
        macs = [_mac(key, method, worker, *said) for key in self._keys.get()]
        if not any(hmac.compare_digest(mac, token["mac"]) for mac in macs):
            return f"the {HEADER} is not of {service}'s key, or not for this call; {_REMEDY}"
        now = self._clock()
        late_s = now - int(token["time"])
        if abs(late_s) > MAX_SKEW_S:
            return (
                f"the {HEADER} is {late_s:.0f} s old by this clock, {MAX_SKEW_S:g} s are allowed; "
                "set the clocks of the nodes by NTP"
            )
        if token["nonce"] in self._seen:
            return f"the {HEADER} was used before; every call needs one of its own"
        # Only holders of the key can add to it, and what is too old by its time needs no memory.
        for oldest in list(self._seen):
            if now - self._seen[oldest] <= 2 * MAX_SKEW_S:
                break
            del self._seen[oldest]
        self._seen[token["nonce"]] = now
        return ""


def _mac(key: bytes, *said: str) -> str:
    return hmac.digest(key, "\n".join(said).encode(), "sha256").hex()


def main(path: str, service: str) -> None:
    """Print the keys of one service, newest first."""
    for key in ServiceKeys(functools.partial(_read, path), service).get():
        sys.stdout.write(f"key:{service}:{key.hex()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
