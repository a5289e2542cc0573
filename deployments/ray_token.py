"""Whether a Ray that others started asks for a token."""

from __future__ import annotations

import json
import logging
import urllib.request

from cluster.errors import ConfigError

log = logging.getLogger(__name__)

HOW_TO_SHARE_A_TOKEN = (
    "write one with `ray get-auth-token --generate` on one node, copy ~/.ray/auth_token to the "
    "others and to here, and start every node with RAY_AUTH_MODE=token"
)
_PATIENCE_S = 10.0


def check_asks_for_token(address: str, dashboard: str) -> None:
    """Raise ConfigError when the cluster at `address` says that it asks nobody for a token.

    dashboard: host:port of its dashboard, "" when it has none; then the cluster cannot be asked.
    """
    if not dashboard:
        log.warning("the Ray cluster at %s has no dashboard that says who may use it", address)
        return
    url = f"http://{dashboard}/api/authentication_mode"
    try:
        with urllib.request.urlopen(url, timeout=_PATIENCE_S) as reply:
            mode = json.loads(reply.read())["authentication_mode"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s does not say who may use that Ray cluster: %s", url, error)
        return
    if mode == "disabled":
        raise ConfigError(
            f"--address {address}: that Ray asks nobody for a token, so whoever reaches its ports "
            f"may run code; {HOW_TO_SHARE_A_TOKEN}"
        )
