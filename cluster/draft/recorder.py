"""The recorder: keeps served answers with the target's laws, for drafters to be trained on.

It sits inside the target as a drafter does, reads its steps, and drafts nothing.  What it keeps is
text, so nothing is kept unless the configuration says whose: docs/learning.md.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from cluster.config.parse import PositiveInt, Range, Share
from cluster.core import Commit, DraftTask, Observation, Proposal, TokenArray
from cluster.draft.base import DrafterContext
from cluster.draft.inside import WANTS_NOTHING, StepRows, StepWants, host_of
from cluster.draft.once_a_minute import OnceAMinute
from cluster.draft.recorded import (
    UNSALTED,
    Folder,
    Origin,
    RecordedAnswer,
    RejectedNodes,
    encode,
    new_name,
    tenant_name,
    tokens_in,
    written_s,
)
from cluster.errors import ConfigError
from cluster.requests.tenant import DEFAULT_TENANT, PROFILE_TENANT

log = logging.getLogger(__name__)

# As many as the trainer's own answers have.
_NUM_TOP = 32
# Finished answers that wait for the thread that keeps them; more are not kept.
_MAX_WAITING = 256
# Bounds and requests of the operator are looked at so often.
_EVERY_S = 5.0
# The names of an operator's requests: files in the recorder's folder.
SPILL = "spill"
RELEASE = ".release"


@dataclass(frozen=True, slots=True)
class RecorderOptions:
    """Answers with the target's laws, to train drafters on: token ids, which are text. Nothing is
    kept by default; see docs/learning.md."""

    tenants: Literal["none", "unsalted", "all"] = "none"
    """Whose requests are recorded. none = nobody's; unsalted = those without an API key and without
    a `cache_salt`, which are one tenant; all = everybody's, each tenant's apart. What the folder
    has of tenants that this leaves out is deleted."""
    share: Share = 0.1
    """Share of their requests."""
    keep: Literal["memory", "disk"] = "memory"
    """memory = in the target's process, until an operator asks for it by a file named `spill` in
    the folder; disk = in the folder, at once."""
    folder: str = ""
    """Where files are written: each tenant's in a folder of its own that only the server's user may
    read. They hold prompts and answers."""
    max_tokens: PositiveInt = 400_000
    """Tokens that are kept of one tenant (prompts, answers and rejected drafts), about 200 bytes
    each; the oldest answers are deleted."""
    max_age_h: Annotated[float, Range(0, is_open=True)] = 72.0
    """Answers are deleted after so many hours."""
    max_tenants: PositiveInt = 8
    """Tenants of which anything is kept; what is kept of the one that has been silent for longest
    is deleted."""

    def __post_init__(self) -> None:
        if self.tenants != "none" and not self.folder:
            raise ConfigError.at("folder", "missing; name the folder where answers are written")


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
        self._waiting: queue.Queue[tuple[bytes, RecordedAnswer] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def keep(self, tenant: bytes, answer: RecordedAnswer) -> None:
        """Take an answer; it is dropped where the thread cannot follow."""
        try:
            self._waiting.put_nowait((tenant, answer))
        except queue.Full:
            log.debug("recorder does not follow; an answer is dropped")

    def close(self) -> None:
        """Write what waits, and end."""
        self._waiting.put(None)
        self._thread.join(_EVERY_S)

    def _run(self) -> None:
        is_over, swept_at = False, -math.inf
        while not is_over:
            try:
                item = self._waiting.get(timeout=_EVERY_S)
                is_over = item is None
                if item is not None:
                    self._put(*item)
            except queue.Empty:
                pass
            except OSError as error:
                self._complain(error)
            if is_over or time.monotonic() - swept_at >= _EVERY_S:
                swept_at = time.monotonic()
                try:
                    self.sweep()
                except OSError as error:
                    self._complain(error)

    def _complain(self, error: OSError) -> None:
        if self._said.is_due("disk", time.monotonic()):
            log.warning("recorder cannot write folder=%s: %s", self._options.folder, error)

    def _put(self, tenant: bytes, answer: RecordedAnswer) -> None:
        to = self._folder if self._options.keep == "disk" and self._folder else self._memory
        name = new_name(self._wall(), answer.num_tokens)
        to.put(tenant_name(tenant), name, encode(answer, self._origin))
        self._trim(to)

    def sweep(self) -> None:
        """Do what the operator asks for, and keep the bounds."""
        folder = self._folder
        if folder is not None:
            for request in folder.path.glob(f"*{RELEASE}"):
                for each in (folder, self._memory):
                    each.drop(request.stem, each.names(request.stem))
                request.unlink(missing_ok=True)
            if (folder.path / SPILL).exists():
                for tenant in self._memory.tenants():
                    for name, data in list(self._memory.data[tenant].items()):
                        folder.put(tenant, name, data)
                        self._memory.drop(tenant, [name])
                (folder.path / SPILL).unlink(missing_ok=True)
            self._trim(folder)
        self._trim(self._memory)

    def _trim(self, kept: Folder | _Memory) -> None:
        """Delete what is beyond the bounds, and of whom nothing is to be kept."""
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


@dataclass(slots=True, eq=False)
class _Recording:
    """One answer that is being written.

    prompt: the text before the first recorded law.  is_open: nothing of it was missed so far.
    The lists have a step's part each; of the rejected ones a parent is an index in all parts.
    """

    rows: StepRows
    prompt: TokenArray
    is_open: bool = True
    length: int = 0
    num_rejected: int = 0
    tokens: list[TokenArray] = field(default_factory=list)
    laws: list[tuple[TokenArray, NDArray[np.float32]]] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    rejected: list[TokenArray] = field(default_factory=list)
    rejected_laws: list[tuple[TokenArray, NDArray[np.float32]]] = field(default_factory=list)

    def take(self, rows: StepRows) -> None:
        """Take in a step: the tokens that became text, with their laws, and the other nodes."""
        assert rows.top is not None
        assert rows.next_token is not None
        top, num_context = rows.top, rows.num_context
        nodes = rows.token_ids[num_context:]
        drawn = np.append(nodes[rows.path], np.int32(rows.next_token)).astype(np.int32)
        at = np.append(-1, rows.path) + 1  # rows of `top`: that of the text's end is the first
        num = self._length_of(drawn, rows)
        self.tokens.append(drawn[:num])
        self.laws.append((top.token_ids[at[:num]], top.logprobs[at[:num]]))
        self.num_accepted.append(min(len(rows.path), num))
        self._reject(rows, nodes)
        self.length += num
        self.is_open = num == len(drawn) and drawn[-1] not in self.rows.params.stop_token_ids

    def _length_of(self, drawn: TokenArray, rows: StepRows) -> int:
        """How many of a step's tokens belong to the answer, a stop token included."""
        params = self.rows.params
        for index, token in enumerate(drawn.tolist()):
            is_late = self.length + index >= params.min_tokens
            if is_late and token in params.stop_token_ids:
                return index + 1
        return len(drawn)

    def _reject(self, rows: StepRows, nodes: TokenArray) -> None:
        """Note the nodes that did not become text."""
        # Of each node, and of the text's end before them: a place behind it, and its number among
        # the rejected; -1 = it is text.
        depth = {-1: self.length, **{int(n): self.length + i for i, n in enumerate(rows.path, 1)}}
        number = dict.fromkeys(depth, -1)
        chosen: list[int] = []
        for node, parent in enumerate(rows.parents.tolist()):
            if node in depth:
                continue
            self.places.append(depth[parent])
            self.parents.append(number[parent])
            depth[node], number[node] = depth[parent] + 1, self.num_rejected + len(chosen)
            chosen.append(node)
        if chosen:
            assert rows.top is not None
            at = np.array(chosen) + 1
            self.num_rejected += len(chosen)
            self.rejected.append(nodes[at - 1])
            self.rejected_laws.append((rows.top.token_ids[at], rows.top.logprobs[at]))

    def answer(self) -> RecordedAnswer:
        """All that was recorded."""
        candidates, log_probs = _joined(self.laws)
        width = candidates.shape[1]
        is_accepted = np.zeros(self.length, np.bool_)
        ends = np.cumsum([len(each) for each in self.tokens])
        for end, part, count in zip(ends, self.tokens, self.num_accepted, strict=True):
            is_accepted[end - len(part) : end - len(part) + count] = True
        laws = _joined(self.rejected_laws, width)
        tokens = np.concatenate(self.rejected) if self.rejected else np.empty(0, np.int32)
        rejected = RejectedNodes(
            np.array(self.places, np.int32), np.array(self.parents, np.int32), tokens, *laws
        )
        params = self.rows.params
        return RecordedAnswer(
            self.prompt, np.concatenate(self.tokens), candidates, log_probs, is_accepted, rejected,
            params.law, params.temperature,
        )  # fmt: skip


def _joined(
    parts: Sequence[tuple[TokenArray, NDArray[np.float32]]], width: int = 0
) -> tuple[TokenArray, NDArray[np.float16]]:
    if not parts:
        return np.empty((0, width), np.int32), np.empty((0, width), np.float16)
    ids, logprobs = zip(*parts, strict=True)
    return np.concatenate(ids).astype(np.int32), np.concatenate(logprobs).astype(np.float16)


class RecorderDrafter:
    """A `StepReader` that drafts nothing."""

    only_reads = True  # see `Drafter`

    def __init__(self, context: DrafterContext, options: RecorderOptions) -> None:
        self._host = host = host_of(context.target, context.name, "recorder")
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
        heard = {"unsalted": rows.tenant == DEFAULT_TENANT, "all": rows.tenant != PROFILE_TENANT}
        if not is_the_targets or not heard.get(self._options.tenants):
            return None
        if zlib.crc32(rows.request_id.encode()) >= self._options.share * 2**32:
            return None
        end = rows.first_position + rows.num_context
        prompt = self._host.token_ids(rows.request_id)[:end]
        return _Recording(rows, prompt) if len(prompt) == end else None
