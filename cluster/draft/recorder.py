"""The recorder: keeps served answers with the target's laws, for drafters to be trained on.

It sits inside the target as a drafter does, reads its steps, and drafts nothing.  What it keeps is
text, so nothing is kept unless the configuration says whose: docs/learning.md.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.core import Commit, Observation, Proposal, TokenArray
from cluster.draft.base import DrafterContext, DraftTask
from cluster.draft.inside import WANTS_NOTHING, StepRows, StepWants, host_of
from cluster.draft.options import RecorderOptions
from cluster.draft.recorded import (
    ARRAYS,
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
from cluster.plan.roster import lot_of
from cluster.requests.fields import PROFILE_TENANT

log = logging.getLogger(__name__)

# As many as the trainer's own answers have.
_NUM_TOP = 32
# Finished answers that wait for the thread that keeps them; more are not kept.
_MAX_WAITING = 256
# Requests of the operator are looked for so often, and bounds are kept so often, or after
# _MAX_WAITING answers: that walks through all names, of which there may be thousands.
_OBEYS_EVERY_S = 5.0
_TRIMS_EVERY_S = 60.0
# A request to release a tenant stands for so long: other targets look into the folder too.
_REQUEST_STANDS_S = 3.0 * _OBEYS_EVERY_S
# The names of an operator's requests: files in the recorder's folder.
SPILL = "spill"
RELEASE = ".release"


@dataclass(slots=True, eq=False)
class _Recording:
    """One answer that is being written.

    prompt: the text before the first recorded law.  is_open: nothing of it was missed so far.
    parts: a step's part each, by the names of `RecordedAnswer`.
    """

    rows: StepRows
    prompt: TokenArray
    is_open: bool = True
    length: int = 0
    num_rejected: int = 0
    parts: defaultdict[str, list[NDArray[Any]]] = field(default_factory=lambda: defaultdict(list))

    def take(self, rows: StepRows) -> None:
        """Take in a step: the tokens that became text, with their laws, and the other nodes."""
        assert rows.top is not None
        assert rows.next_token is not None
        nodes = rows.token_ids[rows.num_context :]
        drawn = np.append(nodes[rows.path], rows.next_token)
        num = self._length_of(drawn)
        at = (np.append(-1, rows.path) + 1)[:num]  # that of the text's end is the first
        rejected, places, parents = self._rejected(rows)
        part = {
            "token_ids": drawn[:num],
            "candidates": rows.top.token_ids[at],
            "log_probs": rows.top.logprobs[at],
            "is_accepted": np.arange(num) < len(rows.path),
            "rejected_places": places,
            "rejected_parents": parents,
            "rejected_token_ids": nodes[rejected],
            "rejected_candidates": rows.top.token_ids[rejected + 1],
            "rejected_log_probs": rows.top.logprobs[rejected + 1],
        }
        for name, array in part.items():
            self.parts[name].append(array)
        self.length += num
        self.is_open = num == len(drawn) and drawn[-1] not in self.rows.params.stop_token_ids

    def _length_of(self, drawn: TokenArray) -> int:
        """How many of a step's tokens belong to the answer, a stop token included."""
        params = self.rows.params
        for index, token in enumerate(drawn.tolist()):
            is_late = self.length + index >= params.min_tokens
            if is_late and token in params.stop_token_ids:
                return index + 1
        return len(drawn)

    def _rejected(self, rows: StepRows) -> NDArray[np.int32]:
        """Of the nodes that did not become text: [node, place, parent among all of them]."""
        # Of each node, and of the text's end before them: a place behind it, and its number among
        # the rejected; -1 = it is text.
        place = {-1: self.length, **{int(n): self.length + i for i, n in enumerate(rows.path, 1)}}
        number = dict.fromkeys(place, -1)
        found: list[tuple[int, int, int]] = []
        for node, parent in enumerate(rows.parents.tolist()):
            if node not in number:
                found.append((node, place[parent], number[parent]))
                place[node], number[node] = place[parent] + 1, self.num_rejected
                self.num_rejected += 1
        return np.array(found, np.int32).reshape(-1, 3).T

    def answer(self) -> RecordedAnswer:
        """All that was recorded."""
        arrays: dict[str, Any] = {
            name: np.concatenate(parts).astype(ARRAYS[name][0])
            for name, parts in self.parts.items()
        }
        params = self.rows.params
        return RecordedAnswer(
            prompt=self.prompt, law=params.law, temperature=params.temperature, **arrays
        )


def _hears(options: RecorderOptions, tenant: str) -> bool:
    """True if requests of the tenant of this name are recorded."""
    return options.tenants == "all" or (options.tenants == "unsalted" and tenant == UNSALTED)


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
        self._memory, self._num_put = _Memory(), 0
        self._folder = Folder(Path(options.folder)) if options.folder else None
        self._said = OnceAMinute()
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        """Keep the bounds from now on; what never serves must not delete what another one keeps."""
        if self._thread.ident is None:
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
        if self._thread.ident is None:
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
        self._num_put += 1
        if self._num_put % _MAX_WAITING == 0:
            self.trim()

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
        options = self._options
        oldest_s = self._wall() - 3600.0 * options.max_age_h
        for kept in (self._folder, self._memory):
            if kept is None:
                continue
            names = {tenant: kept.names(tenant) for tenant in kept.tenants()}
            by_use = sorted(names, key=lambda each: max(names[each], default=""), reverse=True)
            heard = [each for each in by_use if _hears(options, each)][: options.max_tenants]
            for tenant, theirs in names.items():
                room = options.max_tokens if tenant in heard else 0
                dropped = []
                for name in reversed(theirs):
                    room -= tokens_in(name)
                    if room < 0 or written_s(name) < oldest_s:
                        dropped.append(name)
                kept.drop(tenant, dropped)


class RecorderDrafter:
    """A `StepReader` that drafts nothing."""

    is_look_up = only_reads = True  # see `Drafter`

    def __init__(self, context: DrafterContext, options: RecorderOptions) -> None:
        self._host = host = host_of(context, "recorder")
        self._options = options
        # Those that are not recorded are here too, as None.
        self._recordings: dict[str, _Recording | None] = {}
        is_on = options.tenants != "none" and options.share > 0.0
        self.wants = StepWants(num_top=_NUM_TOP) if is_on else WANTS_NOTHING
        self.keeper = Keeper(
            options, Origin(host.model_hash, context.tokenizer_hash, context.vocab_size)
        )
        # Also when the process ends.
        weakref.finalize(self, self.keeper.close)

    def begin(self) -> None:
        """See `Drafter`."""
        self.keeper.start()

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        """See `Drafter.observe`; the rows say all."""
        return [
            Observation(each.request_id, each.generation, each.base_len + len(each.token_ids))
            for each in commits
        ]

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`."""
        return []

    def read(self, rows: Sequence[StepRows]) -> None:
        """See `StepReader`: record the step's part of each answer that is recorded."""
        for each in rows:
            if each.top is None or each.next_token is None:
                continue
            if each.request_id not in self._recordings:
                self._recordings[each.request_id] = self._opened(each)
            recording = self._recordings[each.request_id]
            if recording is None or not recording.is_open:
                continue
            first = each.first_position + each.num_context
            if (
                first != len(recording.prompt) + recording.length
                or each.generation != recording.rows.generation
                or first + recording.num_rejected > self._options.max_tokens
            ):
                recording.is_open = False  # steps are missing, or there is no room for more
                continue
            recording.take(each)

    def takes(self, request_id: str, tenant: bytes) -> bool:
        """See `Drafter`: requests of the tenants that are recorded, of which a share."""
        is_heard = tenant != PROFILE_TENANT and _hears(self._options, tenant_name(tenant))
        return is_heard and lot_of(request_id) < self._options.share

    def release(self, request_ids: Sequence[str]) -> None:
        """See `Drafter.release`: what was recorded is an answer now."""
        for request_id in request_ids:
            recording = self._recordings.pop(request_id, None)
            if recording is not None and recording.length:
                self.keeper.keep(recording.rows.tenant, recording.answer())

    def _opened(self, rows: StepRows) -> _Recording | None:
        """A new recording; None where the request is not recorded."""
        params = rows.params
        is_the_targets = not (params.forced_ids or params.beams or rows.adapter)
        if not is_the_targets or not self.takes(rows.request_id, rows.tenant):
            return None
        end = rows.first_position + rows.num_context
        prompt = self._host.token_ids(rows.request_id)[:end]
        return _Recording(rows, prompt) if len(prompt) == end else None
