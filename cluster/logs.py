"""The form of our processes' logs: lines for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Hashable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

# Set while a request is served: its id is then on each line that is written meanwhile.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")

# The line for people of a part's log.
_LINE = "%(levelname)s %(asctime)s %(name)s: %(message)s"
# In a line for people, what is not known.  An object has no key for it.
UNKNOWN = "-"


class JsonLines(logging.Formatter):
    """Formats a record as an object on one line.

    Where a message's arguments have names (`"%(tokens)d", {"tokens": 3}`), each is a key of its
    own.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        if isinstance(record.args, Mapping):
            line |= {key: value for key, value in record.args.items() if value != UNKNOWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(
    form: LogFormat,
    text: str = _LINE,
    level: int | str = logging.INFO,
    *,
    anew: bool = False,
) -> None:
    """Let this process log to stderr, unless it does already, or in another form from now on.

    text: the format for people.  anew: for a process that logged before it had read how."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(text))
    logging.basicConfig(level=level, handlers=[handler], force=anew)
    # It logs every request to a hub or a server at INFO.
    logging.getLogger("httpx").setLevel(logging.WARNING)


def is_json() -> bool:
    """True if this process logs JSON."""
    return any(isinstance(each.formatter, JsonLines) for each in logging.getLogger().handlers)


def said(text: str, level: int = logging.INFO, *, beginning: str = "drafthouse: ") -> str:
    """Return as a line of this process's log what the program itself says to people.

    beginning: of the line for people."""
    if not is_json():
        return beginning + text
    return JsonLines().format(
        logging.LogRecord("drafthouse", level, __file__, 0, text, args=None, exc_info=None)
    )


def say(text: str, level: int = logging.INFO) -> None:
    """Say something to people on stderr, at once."""
    sys.stderr.write(f"{said(text, level)}\n")
    sys.stderr.flush()


# Says once a minute, with a count, what comes up many times a second.


_PERIOD_S = 60.0
# Of more things that are said the first are forgotten: they may then be said again too soon.
_MAX_KEYS = 256


class OnceAMinute:
    """Times are seconds of any one monotonic clock."""

    def __init__(self) -> None:
        self._said: dict[Hashable, tuple[float, int]] = {}  # when, and how often it came until now

    def is_due(self, key: Hashable, now: float) -> int:
        """Return how often `key` has come, with this time, where it is to be said now; else 0."""
        said_at, count = self._said.get(key, (float("-inf"), 0))
        is_due = now - said_at >= _PERIOD_S
        if len(self._said) >= _MAX_KEYS and key not in self._said:
            del self._said[next(iter(self._said))]
        self._said[key] = now if is_due else said_at, count + 1
        return count + 1 if is_due else 0
