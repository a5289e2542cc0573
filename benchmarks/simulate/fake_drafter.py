"""A drafter whose device is fake: it offers a recorded drafter's trees, grown at a set speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulate.recording import Recording
from cluster.config.parse import PositiveInt
from cluster.core import Commit, DraftTask, Proposal
from cluster.draft.base import DrafterContext
from cluster.draft.committed_text import CommittedTextDrafter, RequestState
from cluster.simulate.texts import RecordedText
from cluster.simulate.world import Growing, recorded

# The time of a pass of the model, which adds nodes to all trees.
PASS_S = 0.005


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """nodes_per_s, texts: as in a file of `drafthouse simulate`."""

    recording: str = ""
    drafter: str = "lm"
    nodes_per_s: PositiveInt = 1000
    texts: PositiveInt = 8


@dataclass(slots=True, eq=False)
class _Request(RequestState):
    recorded: RecordedText | None = None
    growing: Growing | None = None
    offered: Proposal | None = None


class FakeDrafter(CommittedTextDrafter[_Request]):
    """Sleeps through a pass, as long as a device would take, and then offers what has grown."""

    Options = FakeOptions

    def __init__(self, context: DrafterContext, options: FakeOptions) -> None:
        super().__init__(context, _Request.opened_by)
        self._texts = Recording.read(Path(options.recording)).texts
        self._options = options
        self._is_called = threading.Event()

    def interrupt(self) -> None:
        """See `Interruptible`."""
        self._is_called.set()

    def _forget_tree(self, request: _Request) -> None:
        request.growing = None

    def _advance(self, request: _Request, commit: Commit) -> None:
        request.text.truncate(commit.base_len)
        request.text.append(commit.token_ids)
        if commit.base_len == 0:
            request.recorded = self._texts[int(commit.token_ids[0])]
        if request.recorded is None or request.next_position >= len(request.recorded.token_ids):
            request.growing = None
            return
        now, options = time.perf_counter(), self._options
        if request.growing is None:
            source = recorded(options.drafter)
            request.growing = Growing(source, 0.0, 0.0, request.next_position, since_s=now)
        else:
            request.growing.commit(request.recorded, request.next_position, now)
        share = min(1.0, options.texts / len(self._requests))
        request.growing.rate, request.offered = options.nodes_per_s * share, None

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`."""
        self._is_called.wait(PASS_S)
        self._is_called.clear()
        return [each for request, _ in self._asked(tasks) if (each := self._grown(request))]

    def _grown(self, request: _Request) -> Proposal | None:
        """Return the present tree, None once it is whole and has been offered."""
        growing, text, offered = request.growing, request.recorded, request.offered
        if growing is None or text is None:
            return None
        tree, survival = growing.at(text, time.perf_counter())
        if offered is not None and len(tree) == len(offered.tree):
            whole, _ = growing.source.tree_at(text, growing.position)
            return offered if len(tree) < len(whole) else None
        length = len(request.text)
        request.offered = Proposal(
            request.request_id, request.generation, length, request.text.hash_at(length), tree,
            survival, self._name,
        )  # fmt: skip
        return request.offered
