"""TLS of the ingress' HTTP listener, with a certificate that may be replaced at any time."""

from __future__ import annotations

import ssl

from cluster.config.pem import PemFiles
from cluster.config.reloaded import Reloaded


class ReloadedContext(ssl.SSLContext):
    """A server's context; a connection gets the certificate that the files hold when it begins."""

    _current: Reloaded[ssl.SSLContext]

    @classmethod
    def of(cls, files: PemFiles) -> ReloadedContext:
        """Raises ConfigError for files that cannot be used."""
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context._current = Reloaded(files.paths, files.context)
        return context

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Called by the event loop for every connection."""
        now = self._current.get()
        return now.wrap_bio(incoming, outgoing, server_side, server_hostname, session)
