"""What Ray reads from its environment, set before `ray` is imported for the first time.

Ray runs code for whoever reaches its ports: the dashboard takes jobs, Serve's replicas unpickle
what their own gRPC servers are sent, on all interfaces whatever anybody configures.  So no command
of ours starts or joins a Ray that does not ask for a token.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from cluster.config.schema import Config
from cluster.errors import ConfigError

log = logging.getLogger(__name__)
HOW_TO_SHARE_A_TOKEN = (
    "write one with `ray get-auth-token --generate` on one node, copy ~/.ray/auth_token to the "
    "others and to here, and start every node with RAY_AUTH_MODE=token"
)
_PATIENCE_S = 10.0

_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_SEARCH_PATH = "PYTHONPATH"


def prepare_to_start(config: Config, places: Sequence[Path] = ()) -> None:
    """For a Ray of this command's own.  Raises ConfigError where a token is not to be asked for.

    The token is the one that the environment names, else one is drawn.  places: folders in which
    replicas look for the modules of external drafters.
    """
    prepare_to_join()
    if not os.environ.get(_TOKEN) and not os.environ.get(_TOKEN_PATH):
        os.environ[_TOKEN] = secrets.token_hex(32)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Workers at nice 15, Ray's default, leave drafters no room to stand back behind the target.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Busy cores do not answer in a tenth of a second, and Serve would say so for each question.
    os.environ.setdefault("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "1")
    # Each of a process's forty threads would keep memory in an arena of its own.
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    # Actors that reserve no GPU still see them: `device: auto` uses one without any flag.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    searched = [*filter(None, (os.environ.get(_SEARCH_PATH), *map(str, places)))]
    if searched:  # Ray would search the present folder for an empty one
        os.environ[_SEARCH_PATH] = os.pathsep.join(searched)
    if config.network.interface == "loopback":
        # Named for where Ray does so by default; on Linux, too, 0 means a node known as 127.0.0.1,
        # at which then every server of Ray's own listens.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def use_token(token: str | None) -> None:
    """Show this token to the Ray that is joined; None = that of the user's own file."""
    if token is not None:
        os.environ[_TOKEN] = token


def drawn_token() -> str | None:
    """The token to show to the dashboard; None where a file of the user's own holds it."""
    return os.environ.get(_TOKEN)


def prepare_to_join() -> None:
    """For a Ray that runs already; raises ConfigError where no token is to be shown to it."""
    mode = os.environ.setdefault(_MODE, "token")
    if mode != "token":
        raise ConfigError(
            f"{_MODE}={mode}: whoever reaches this machine's ports could run code on it; unset it, "
            "and a token will be asked for",
            param=_MODE,
        )


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
