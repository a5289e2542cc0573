"""Separates tenants: clients with different salts share no learned state.

Drafters' stores and the prefix cache keep data of earlier texts, which makes later ones faster.  A
client can see how fast it is served, so with a shared cache it could find out what others wrote.
A tenant is the key that a request is sent with, and the `cache_salt` that it names, as in vLLM; all
requests without either are one tenant.
"""

from __future__ import annotations

import hashlib

# Only the clients of a tenant and the ingress know its key and salt.  Everything behind the ingress
# knows this digest, which distinguishes tenants and is of no use to a client.
_DIGEST_BYTES = 16

DEFAULT_TENANT = b""
# Of texts that a target writes to measure itself: no client shares what is learned there.
PROFILE_TENANT = b"draft-profile"


def tenant_of(cache_salt: str | None, owner: str = "") -> bytes:
    """Return the tenant of the clients that send this salt; DEFAULT_TENANT without salt and owner.

    owner: the name of their key, "" where no keys are asked for.
    """
    if not cache_salt and not owner:
        return DEFAULT_TENANT
    # The owner's own digest is the key of the hash: no salt of one is that of another.
    key = hashlib.blake2b(owner.encode()).digest() if owner else b""
    return hashlib.blake2b(
        (cache_salt or "").encode(), digest_size=_DIGEST_BYTES, person=b"cache_salt", key=key
    ).digest()
