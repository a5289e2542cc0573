"""How those who connect are told from strangers: between the parts, and to clients."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

from cluster.config.pem import PemFiles
from cluster.errors import ConfigError
from cluster.records import frozen

# Each part has one of them.
ROLES = ("ingress", "coordinator", "target", "drafter")

# Stands for the role in the names of files.
_ROLE = "{role}"


def dns_name(role: str) -> str:
    """Return the name that a part's certificate carries."""
    return f"{role}.drafthouse"


@frozen
class NetworkConfig:
    """How the parts reach each other: coordinators, targets, drafters, and Ray where `drafthouse
    serve` starts it. Ray asks for a token, and the others for one of their own (`data_plane`)."""

    interface: Literal["loopback", "node"] = "loopback"
    """loopback = 127.0.0.1, for one machine. node = the node's address as Ray knows it, for
    clusters; what goes over the network is in clear without `data_plane.tls`."""


def _check_complete(section: PartsTlsConfig | TlsConfig) -> None:
    """Raise ConfigError where some of the files that belong together are named, and not all."""
    keys = [each.name for each in fields(section)]
    missing = [key for key in keys if not getattr(section, key)]
    if missing and len(missing) < len(keys):
        raise ConfigError.at(missing[0], f"empty; name {', '.join(keys)} together, or none of them")


@frozen
class PartsTlsConfig:
    """TLS between the parts, where each shows its certificate: all three files, or none. In their
    names `{role}` stands for ingress, coordinator, target or drafter."""

    cert_file: str = ""
    """A PEM file with the certificate, and those between it and ca_file's. It must carry the DNS
    name `ROLE.drafthouse`. Files that are replaced are read anew, for new connections."""
    key_file: str = ""
    """A PEM file with its private key, without a passphrase."""
    ca_file: str = ""
    """A PEM file with the authorities that certificates of the parts come from, and of nobody
    else."""

    def __post_init__(self) -> None:
        _check_complete(self)

    def files(self, role: str) -> PemFiles | None:
        """Return the files of one part; None without TLS."""
        if not self.cert_file:
            return None
        cert, key, ca = (
            each.replace(_ROLE, role) for each in (self.cert_file, self.key_file, self.ca_file)
        )
        return PemFiles("data_plane.tls", cert, key, ca, dns_name(role))


@frozen
class DataPlaneConfig:
    """How coordinators, targets and drafters know who calls them; see docs/data-plane.md."""

    secret_file: str = ""
    """A file with a secret of 32 characters or more per line, the same in every process: the first
    signs calls, all are accepted, and changes are read at once. Empty = a secret that Ray keeps for
    its cluster; without Ray none, and then the parts listen on loopback only."""
    tls: PartsTlsConfig = PartsTlsConfig()


@frozen
class TlsConfig:
    """TLS for clients, over HTTP and gRPC: both files, or none."""

    cert_file: str = ""
    """A PEM file with the certificate and those between it and the authority that clients know.
    Files that are replaced are read anew, for new connections."""
    key_file: str = ""
    """A PEM file with its private key, without a passphrase."""

    def __post_init__(self) -> None:
        _check_complete(self)

    def files(self) -> PemFiles | None:
        """Return the files; None without TLS."""
        return PemFiles("tls", self.cert_file, self.key_file) if self.cert_file else None
