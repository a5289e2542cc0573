"""Separates tenants: clients with different salts share no learned state.

Drafters' stores and the prefix cache keep data of earlier texts, which makes later ones faster.  A
client can see how fast it is served, so with a shared cache it could find out what others wrote.
A request names its tenant by `cache_salt`, as in vLLM; all requests without one are one tenant.
"""

from __future__ import annotations

import hashlib

# Only the clients of a tenant and the ingress know its salt.  Everything behind the ingress knows
# this digest, which distinguishes tenants and is of no use to a client.
_DIGEST_BYTES = 16

DEFAULT_TENANT = b""


def tenant_of(cache_salt: str | None) -> bytes:
    """The tenant of the clients that send this salt; DEFAULT_TENANT for those that send none."""
    if not cache_salt:
        return DEFAULT_TENANT
    return hashlib.blake2b(
        cache_salt.encode(), digest_size=_DIGEST_BYTES, person=b"cache_salt"
    ).digest()
