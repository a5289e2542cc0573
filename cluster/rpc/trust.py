"""How one process shows the others who it is, and knows who they are.

Tokens are asked for wherever there is a secret; with certificates, connections are encrypted and
both ends show one that names their role.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from cluster.config.addresses import is_loopback
from cluster.config.doors import DataPlaneConfig, dns_name
from cluster.config.pem import Pem
from cluster.config.reloaded import Reloaded
from cluster.errors import ConfigError
from cluster.records import frozen
from cluster.rpc.tokens import Secrets, ServiceKeys, secrets_of


@frozen
class Trust:
    """secrets: of the cluster; None = no tokens, for loopback only.  pem: of this process' role;
    None = no TLS."""

    secrets: Secrets | None = None
    pem: Reloaded[Pem] | None = None

    def keys(self, role: str, name: str) -> ServiceKeys | None:
        """Return the keys of the targets, of the coordinators, or of the drafters called `name`;
        None where no tokens are asked for."""
        if self.secrets is None:
            return None
        return ServiceKeys(self.secrets, f"drafter {name}" if role == "drafter" else role)

    def check_at(self, host: str) -> None:
        """Raise ConfigError for a server that strangers would reach and nothing protects."""
        if self.secrets is None and not is_loopback(host):
            raise ConfigError.at(
                "data_plane.secret_file",
                f"others reach {host}, and nothing tells them from parts of this cluster; name a "
                "file with a secret that all parts have, or listen on 127.0.0.1",
            )

    def channel(
        self, address: str, role: str, options: Sequence[tuple[str, int | str]]
    ) -> grpc.aio.Channel:
        """Open a channel to a server of that role."""
        if self.pem is None:
            return grpc.aio.insecure_channel(address, options=options)
        pem = self.pem.get()
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
        named = [*options, ("grpc.ssl_target_name_override", dns_name(role))]
        return grpc.aio.secure_channel(address, credentials, options=named)

    def listen(self, server: grpc.aio.Server, where: str) -> int:
        """Have a server listen at "host:port"; returns the port.  RuntimeError if it is taken."""
        if self.pem is None:
            return int(server.add_insecure_port(where))
        return int(server.add_secure_port(where, server_credentials(self.pem)))


# For parts of one machine that strangers do not reach.
NO_TRUST = Trust()


def trust_of(config: DataPlaneConfig, role: str) -> Trust:
    """Return what the configuration names, for a process of that role.

    Raises ConfigError for files that cannot be used."""
    files = config.tls.files(role)
    return Trust(
        secrets_of(config.secret_file) if config.secret_file else None,
        Reloaded(files.paths, files.load) if files else None,
    )


def server_credentials(pem: Reloaded[Pem]) -> grpc.ServerCredentials:
    """Return credentials that follow the files; who connects must show a certificate where they
    name authorities."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        now = pem.get()
        pairs = [(now.key, now.cert)]
        return grpc.ssl_server_certificate_configuration(pairs, root_certificates=now.ca or None)

    # gRPC asks at every handshake, of connections that are open nothing changes.
    return grpc.dynamic_ssl_server_credentials(
        configuration(), configuration, require_client_authentication=bool(pem.get().ca)
    )
