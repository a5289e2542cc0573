"""What a bug of ours becomes for the client, and for the log."""

from __future__ import annotations

import logging
import traceback

from cluster.errors import DrafthouseError

log = logging.getLogger(__name__)

# The innermost ones: an endless recursion has a thousand.
_MAX_FRAMES = 20


def hidden(error: Exception, request_id: str) -> DrafthouseError:
    """The answer to a request that met `error`; the log says where, in some lines.

    The error's message may contain anything, including prompt text, so it is not told.
    """
    places = "".join(traceback.format_tb(error.__traceback__, limit=-_MAX_FRAMES))
    log.error("unexpected %s id=%s at\n%s", type(error).__name__, request_id, places)
    return DrafthouseError("internal error; the server's log says where it happened")
