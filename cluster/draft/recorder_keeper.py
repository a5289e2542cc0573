"""Keeps what the recorder has recorded within its bounds, in memory or on disk."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cluster.draft.options import RecorderOptions
from cluster.draft.recorded import (
    UNSALTED,
    Folder,
    Origin,
    RecordedAnswer,
    encode,
    new_name,
    tenant_name,
    tokens_in,
    written_s,
)
from cluster.logs import OnceAMinute

log = logging.getLogger(__name__)

# Finished answers that wait for the thread that keeps them; more are not kept.
_MAX_WAITING = 256
# Requests of the operator are looked for so often, and bounds are kept so often: that walks through
# all names, of which there may be thousands.
_OBEYS_EVERY_S = 5.0
_TRIMS_EVERY_S = 60.0
# A request to release a tenant stands for so long: other targets look into the folder too.
_REQUEST_STANDS_S = 3.0 * _OBEYS_EVERY_S
# The names of an operator's requests: files in the recorder's folder.
SPILL = "spill"
RELEASE = ".release"


class _Memory:
    """Like `Folder`, in memory."""

    def __init__(self) -> None:
        self.data: defaultdict[str, dict[str, bytes]] = defaultdict(dict)

    def tenants(self) -> list[str]:
        return list(self.data)

    def names(self, tenant: str) -> list[str]:
        return sorted(self.data.get(tenant, ()))

    def put(self, tenant: str, name: str, data: bytes) -> None:
        self.data[tenant][name] = data

    def drop(self, tenant: str, names: Sequence[str]) -> None:
        for name in names:
            del self.data[tenant][name]
        if not self.data[tenant]:
            del self.data[tenant]


class Keeper:
    """Keeps finished answers within the bounds, in a thread of its own: disks may be slow."""

    def __init__(
        self, options: RecorderOptions, origin: Origin, wall: Callable[[], float] = time.time
    ) -> None:
        self._options = options
        self._origin = origin
        self._wall = wall
        self._memory = _Memory()
        self._folder = Folder(Path(options.folder)) if options.folder else None
        self._said = OnceAMinute()
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Keep the bounds from now on; what never serves must not delete what another one keeps."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
            self._thread.start()

    def keep(self, tenant: bytes, answer: RecordedAnswer) -> None:
        """Take an answer; it is dropped where the thread cannot follow."""
        self.start()
        try:
            self._waiting.put_nowait(partial(self._put, tenant, answer))
        except queue.Full:
            if count := self._said.is_due("queue", time.monotonic()):
                log.warning("recorder does not follow; answers dropped so far: %d", count)

    def close(self, within_s: float = _OBEYS_EVERY_S) -> None:
        """Write what waits, and end."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=within_s)
        self._thread.join(within_s)

    def _run(self) -> None:
        is_over, done_at = False, dict.fromkeys((self.obey, self.trim), -math.inf)
        while not is_over:
            with contextlib.suppress(queue.Empty):
                work = self._waiting.get(timeout=_OBEYS_EVERY_S)
                is_over = work is None
                self._do(work, "an answer")
            now = time.monotonic()
            for work, every_s in ((self.obey, _OBEYS_EVERY_S), (self.trim, _TRIMS_EVERY_S)):
                if is_over or now - done_at[work] >= every_s:
                    done_at[work] = now
                    self._do(work, "its bounds")

    def _do(self, work: Callable[[], None] | None, what: str) -> None:
        """The thread must outlive any answer."""
        try:
            if work:
                work()
        except OSError as error:
            if self._said.is_due("disk", time.monotonic()):
                log.warning("recorder cannot write folder=%s: %s", self._options.folder, error)
        except Exception:
            log.exception("recorder could not keep %s", what)

    def _put(self, tenant: bytes, answer: RecordedAnswer) -> None:
        to = self._folder if self._options.keep == "disk" and self._folder else self._memory
        name = new_name(self._wall(), answer.num_tokens)
        to.put(tenant_name(tenant), name, encode(answer, self._origin))

    def obey(self) -> None:
        """Do what the operator asks for."""
        if (folder := self._folder) is not None:
            for request in folder.path.glob(f"*{RELEASE}"):
                for each in (folder, self._memory):
                    if request.stem in each.tenants():
                        each.drop(request.stem, each.names(request.stem))
                with contextlib.suppress(FileNotFoundError):
                    if self._wall() - request.stat().st_mtime >= _REQUEST_STANDS_S:
                        request.unlink()
            if (folder.path / SPILL).exists():
                for tenant in self._memory.tenants():
                    for name, data in list(self._memory.data[tenant].items()):
                        folder.put(tenant, name, data)
                        self._memory.drop(tenant, [name])
                (folder.path / SPILL).unlink(missing_ok=True)

    def trim(self) -> None:
        """Delete what is beyond the bounds, and of whom nothing is to be kept."""
        for kept in (self._folder, self._memory):
            if kept is not None:
                self._trim(kept)

    def _trim(self, kept: Folder | _Memory) -> None:
        options = self._options
        oldest_s = self._wall() - 3600.0 * options.max_age_h
        names = {tenant: kept.names(tenant) for tenant in kept.tenants()}
        by_use = sorted(names, key=lambda tenant: max(names[tenant], default=""), reverse=True)
        heard = [tenant for tenant in by_use if self._may_keep(tenant)][: options.max_tenants]
        for tenant, theirs in names.items():
            room = options.max_tokens if tenant in heard else 0
            dropped = []
            for name in reversed(theirs):
                room -= tokens_in(name)
                if room < 0 or written_s(name) < oldest_s:
                    dropped.append(name)
            kept.drop(tenant, dropped)

    def _may_keep(self, tenant: str) -> bool:
        allowed = self._options.tenants
        return allowed == "all" or (allowed == "unsalted" and tenant == UNSALTED)
