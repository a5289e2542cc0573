"""The secret of the data plane, where the configuration names no file with one.

Ray keeps it for its cluster: the first process that asks draws it, and all others get the same.
Whoever can read it there may also run code in the cluster, so it opens nothing that was closed.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from ray.experimental import internal_kv

from cluster.config.schema import Config
from cluster.rpc.trust import Trust, trust_of

_NAMESPACE = "drafthouse"
_KEY = "data-plane-secret"


def trust_in(config: Config, role: str) -> Trust:
    """Return what a replica of that role shows to others and asks of them.

    Raises ConfigError for files that cannot be used."""
    trust = trust_of(config.data_plane, role)
    if trust.secrets is not None:
        return trust
    secret = _cluster_secret()
    return replace(trust, secrets=lambda: (secret,))


def _cluster_secret() -> str:
    drawn = secrets.token_hex(32)
    internal_kv._internal_kv_put(_KEY, drawn, overwrite=False, namespace=_NAMESPACE)
    kept: bytes = internal_kv._internal_kv_get(_KEY, namespace=_NAMESPACE)
    return kept.decode()
