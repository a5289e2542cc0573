"""Waits until the application says that it serves, and shows meanwhile, and later, what the
replicas log.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.config.doors import from_here, joined
from cluster.config.schema import Config
from cluster.draft.registry import refusals
from cluster.errors import WorkerError

# The replicas run already: what is left is that they find each other.
PATIENCE_S = 600.0
# A drafter may still be loading its model when everything else is ready; serving goes without it.
_DRAFTER_PATIENCE_S = 120.0
_REPORT_S = 10.0
# Most are there at the first look or the second; whoever waits for a slow drafter asks less often.
_FIRST_POLL_S = 0.03
_LAST_POLL_S = 0.25


def base_url(config: Config) -> str:
    """Where this machine reaches the HTTP face, without a slash at the end."""
    where = joined(from_here(config.http.host), config.http.port)
    scheme = "https" if config.tls.cert_file else "http"
    return f"{scheme}://{where}"


def wait_until_connected(
    ask: Callable[[], Mapping[str, Any]],
    url: str,
    drafters: Iterable[str],
    check: Callable[[], object],
    say: Callable[[str], None],
    patience_s: float = PATIENCE_S,
) -> Mapping[str, Any]:
    """Until the ingress reports a target and every drafter, or serves without the slow ones.

    Returns what it reports.  Drafters that are refused are not waited for.  ask: what the ingress
    tells operators, with a `status` at least.  url: of the HTTP face, which tells them the same.
    check: called often; may raise to end the waiting.  say: is told at once what is refused, and
    every ten seconds what is waited for.  Raises WorkerError when no target is led in time.
    """
    started = reported = time.monotonic()
    told: dict[str, str] = {}
    poll_s = _FIRST_POLL_S
    while True:
        check()
        state = ask()
        replicas = state.get("drafters", {})
        refused = state.get("refused", {})
        for line in refusals(dict(sorted(refused.items() - told.items()))):
            say(line)
        told |= refused
        missing = sorted(
            name for name in drafters if not replicas.get(name) and name not in refused
        )
        now = time.monotonic()
        if state["status"] == "ok" and (not missing or now - started > _DRAFTER_PATIENCE_S):
            if missing:
                say(f"serving without drafters that are still loading: {', '.join(missing)}")
            return state
        if now - started >= patience_s:
            raise WorkerError(
                f"the application does not serve after {patience_s:g} s: {_told(url, state)}; "
                "see the logs of coordinator and target"
            )
        if now - reported >= _REPORT_S:
            say(f"connecting: {_told(url, state)}")
            reported = now
        time.sleep(poll_s)
        poll_s = min(1.5 * poll_s, _LAST_POLL_S)


def engine_line(state: Mapping[str, Any]) -> str:
    """Return in words what the target computes with, as /health says; "" where it does not."""
    engines = sorted(
        (each for each in state.get("engines", ()) if each["role"] == "target"),
        key=lambda each: bool(each["name"]),  # the target's own, which has no name, is the first
    )
    if not engines or engines[0]["name"]:
        return ""
    own = engines[0]
    graphs = ", CUDA graphs" if own["graphs"] == "cuda" else ""
    products = f", products: {own['products']}" if own.get("products") else ""
    slower = [reason for each in engines for reason in each["fallbacks"]]
    more = f" ({len(slower) - 1} more in /health)" if slower[1:] else ""
    warning = f", slower than wanted: {slower[0]}{more}" if slower else ""
    return (
        f"target on {own['device']}: attention {own['attention']}{graphs}, kernels "
        f"{own['kernels']}{products}, KV cache {own['kv_bytes'] / 2**30:.3g} GiB "
        f"({own['kv_tokens']:,} tokens){warning}"
    )


def _told(url: str, state: Mapping[str, Any]) -> str:
    left_out = ("status", "model", "engines")
    counts = {name: value for name, value in state.items() if name not in left_out}
    told = f"{url}/health says {state['status']}"
    return f"{told} {json.dumps(counts)}" if counts else told


# Shows on the console what the replicas write in their logs, as far as an operator wants it.
#
# Ray keeps each replica's stderr in a file of its own, and those files end with it.

# As `cluster.logs.configure` has them written.
_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+ \S+ ([.\w]+): (.*)")
_OURS = ("cluster", "deployments")
# Of these, what is ordinary as well: a line for each request, and what the coordinator does.
_TALKERS = ("deployments.ingress.tracing", "cluster.coordinator.moment")

# Lines of these that begin so say how far a start is.
_PROGRESS, _PHASE = ("cluster.engine.loading.progress", "cluster.cpp"), "phase "


def is_wanted(line: str) -> bool:
    """True if a line of a replica's log belongs on the console."""
    level, logger, _ = _parts(line)
    if not logger.startswith(_OURS):
        return False
    return level not in ("DEBUG", "INFO") or (level == "INFO" and logger in _TALKERS)


def _parts(line: str) -> Sequence[str]:
    """Return level, logger and message in either form of our log; "" for a line in none."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            return [str(found.get(key, "")) for key in ("level", "logger", "message")]
    named = _LINE.match(line)
    return named.groups() if named else ("", "", "")


class LogFollower:
    """Reads what is new in the replicas' files below one folder; None: they are elsewhere.

    progress: what a model that loads has said last of how far it is.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.progress = ""
        self._read: dict[Path, int] = {}  # bytes, up to the end of a line

    def new_lines(self) -> Iterator[str]:
        """Yield the wanted lines since the last call, file by file."""
        lines: list[str] = []
        for path in sorted(self._folder.glob("worker-*.err")) if self._folder else ():
            offset = self._read.get(path, 0)
            with contextlib.suppress(OSError), path.open("rb") as file:
                if path.stat().st_size < offset:  # Ray has begun it anew
                    offset = 0
                file.seek(offset)
                data = file.read()
                end = data.rfind(b"\n") + 1
                self._read[path] = offset + end
                lines += data[:end].decode("utf-8", "replace").splitlines()
        for line in lines:
            _, logger, message = _parts(line)
            if logger in _PROGRESS and message.startswith(_PHASE):
                self.progress = message
            if is_wanted(line):
                yield line
