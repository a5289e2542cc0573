"""How those who connect are told from strangers: certificates and private keys in PEM files, and
the secret of the parts; and values that are made anew when a file changes."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import asdict, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Generic, NoReturn, TypeVar

from cluster.config.parse import check_that
from cluster.errors import ConfigError, reason_of
from cluster.records import frozen

log = logging.getLogger(__name__)

# Of X509_verify_cert(3): the dates of the certificate.
_NOT_YET_VALID, _EXPIRED = 9, 10
# Hello, certificates, finished, and one more where nothing is left to say.
_NUM_FLIGHTS = 4


@frozen
class Pem:
    """A certificate with its chain, its private key, and the authorities of peers.

    context: a server's, with certificate and key."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes
    context: ssl.SSLContext


# Each part has one of them.
ROLES = ("ingress", "coordinator", "target", "drafter")


def dns_name(role: str) -> str:
    """Return the name that a part's certificate carries."""
    return f"{role}.drafthouse"


@frozen
class TlsConfig:
    """TLS for clients, over HTTP and gRPC: both files, or none."""

    # The key of the file that says whom the certificate comes from.
    ISSUERS: ClassVar = "cert_file"

    cert_file: str = ""
    """A PEM file with the certificate and those between it and the authority that clients know.
    Files that are replaced are read anew, for new connections."""
    key_file: str = ""
    """A PEM file with its private key, without a passphrase."""

    def __post_init__(self) -> None:
        files = asdict(self)
        reason = f"empty; name {', '.join(files)} together, or none of them"
        for key, path in files.items():
            check_that(path or not any(files.values()), key, reason)

    def pem(self, place: str = "tls", name: str = "") -> Reloaded[Pem] | None:
        """Return what the files hold, now and later; None without TLS.

        place: where this section stands.  name: the DNS name that the certificate must carry, "" =
        any.  Raises as `load`."""
        files = [*asdict(self).values()]
        return Reloaded(files, partial(self.load, place, name)) if any(files) else None

    def load(self, place: str, name: str) -> Pem:
        """Read the files; raises ConfigError, with the key at fault and the remedy."""
        with ConfigError.below(place):
            cert = self._read("cert_file", b"-BEGIN CERTIFICATE-")
            key = self._read("key_file", b" PRIVATE KEY-")
            # Those who call a door to clients need no certificate.
            is_mutual = self.ISSUERS == "ca_file"
            ca = self._read("ca_file", b"-BEGIN CERTIFICATE-") if is_mutual else b""
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            try:
                context.load_cert_chain(self.cert_file, self.key_file, self._no_passphrase)
            except OSError as error:
                self._refuse("key_file", f"is not the key of {self.cert_file} ({reason_of(error)})")
            self._show_to_client(context, place, name)
        return Pem(cert, key, ca, context)

    def _read(self, key: str, mark: bytes) -> bytes:
        try:
            data = Path(getattr(self, key)).read_bytes()
        except OSError as error:
            self._refuse(key, f"cannot be read ({error.strerror})")
        if mark not in data:
            self._refuse(key, "holds no PEM of that kind")
        return data

    def _no_passphrase(self) -> NoReturn:
        self._refuse("key_file", "is encrypted; store it without a passphrase")

    def _refuse(self, key: str, reason: str) -> NoReturn:
        remedy = "" if ";" in reason else "; name PEM files that fit and can be read"
        raise ConfigError.at(key, f"{getattr(self, key)} {reason}{remedy}")

    def _show_to_client(self, server: ssl.SSLContext, place: str, name: str) -> None:
        """Have a client of our own look at the certificate.  Of one whose time is over it only
        warns: clients decide what they take."""
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = bool(name)
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            client.load_verify_locations(getattr(self, self.ISSUERS))
        except OSError as error:
            self._refuse(self.ISSUERS, f"holds no certificates ({error})")
        try:
            _shake_hands(client, server, name)
        except ssl.SSLCertVerificationError as error:
            if error.verify_code not in (_NOT_YET_VALID, _EXPIRED):
                self._refuse("cert_file", f"is refused: {error.verify_message}")
            log.warning(
                "%s.cert_file: %s: %s; peers refuse it, so put a valid one there",
                place,
                self.cert_file,
                error.verify_message,
            )
        except ssl.SSLError as error:
            self._refuse("cert_file", f"is refused: {error.reason}")


@frozen
class PartsTlsConfig(TlsConfig):
    """TLS between the parts, where each shows its certificate: all three files, or none. In their
    names `{role}` stands for ingress, coordinator, target or drafter."""

    ISSUERS: ClassVar = "ca_file"

    cert_file: str = ""
    """A PEM file with the certificate, and those between it and ca_file's. It must carry the DNS
    name `ROLE.drafthouse`. Files that are replaced are read anew, for new connections."""
    ca_file: str = ""
    """A PEM file with the authorities that certificates of the parts come from, and of nobody
    else."""

    def pem_of(self, role: str) -> Reloaded[Pem] | None:
        """`pem` of one part."""
        files = (path.replace("{role}", role) for path in asdict(self).values())
        return PartsTlsConfig(*files).pem("data_plane.tls", dns_name(role))


@frozen
class DataPlaneConfig:
    """How coordinators, targets and drafters know who calls them; see docs/data-plane.md."""

    secret_file: str = ""
    """A file with a secret of 32 characters or more per line, the same in every process: the first
    signs calls, all are accepted, and changes are read at once. Empty = a secret that Ray keeps for
    its cluster; without Ray none, and then the parts listen on loopback only."""
    tls: PartsTlsConfig = PartsTlsConfig()


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> None:
    """Raise SSLError where the client objects to the server's certificate."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name or None),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_NUM_FLIGHTS):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()


# Values that are made of files, and made again when one of the files has changed.


T = TypeVar("T")

# When a file was written, its size, and which file it is; None = there is none.
Stamp = tuple[int, int, int] | None


class Reloaded(Generic[T]):
    """The value that `load` makes of files; a look at their times costs a few microseconds.

    A change that cannot be loaded leaves the value as it is, and is said once in the log.
    value: as `get` last returned it.
    """

    def __init__(self, paths: Sequence[str], load: Callable[[], T]) -> None:
        """load: raises ConfigError for files that cannot be used, here too."""
        self._paths = tuple(paths)
        self._load = load
        self._stamp = self._stamps()
        self.value = load()
        self.fault = ""  # why the files as they are now are not used

    def get(self) -> T:
        """Return the value of the files as they are now."""
        stamp = self._stamps()
        if stamp == self._stamp:
            return self.value
        try:
            value = self._load()
        except ConfigError as error:
            self.fault = error.message
            log.error("what was read before stays in use: %s", error.message)
        else:
            if stamp != self._stamps():
                return self.value  # replaced while they were read; the next call reads again
            log.info("read anew: %s", ", ".join(self._paths))
            self.value, self.fault = value, ""
        self._stamp = stamp
        return self.value

    def _stamps(self) -> tuple[Stamp, ...]:
        return tuple(map(_stamp, self._paths))


def _stamp(path: str) -> Stamp:
    try:
        # Follows links: a volume of Kubernetes changes by a link to another folder.
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
