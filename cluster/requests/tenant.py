"""Whose texts may help whose: clients with different salts share nothing that was learned.

What earlier texts leave behind (drafters' stores, the prefix cache) makes later ones faster, and a
client can see how fast it is served.  So it would learn what others wrote, were these not kept
apart.  A request names its circle by `cache_salt`, as in vLLM; requests without one are one tenant.
"""

from __future__ import annotations

import hashlib

# What knows the salt of a tenant is its clients and the front door; everything behind it knows this
# digest, which tells tenants apart and is of no use to a client.
_DIGEST_BYTES = 16

DEFAULT_TENANT = b""


def tenant_of(cache_salt: str | None) -> bytes:
    """The tenant of the clients that send this salt; DEFAULT_TENANT for those that send none."""
    if not cache_salt:
        return DEFAULT_TENANT
    return hashlib.blake2b(
        cache_salt.encode(), digest_size=_DIGEST_BYTES, person=b"cache_salt"
    ).digest()
