"""A target and a drafter with almost no cost, for measuring the coordinator.

The text is fixed: the token at position p is p modulo VOCABULARY.  Every step of the target emits
three tokens of each text, as if two of eight drafts were accepted.  The drafter sends periods of
three positions with nine nodes each: the first two tokens, six wrong tokens beside the three, and
the third token.  So its tree goes on behind every commit, and every commit makes the coordinator
merge.  Everything that depends only on the position is computed once.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np

from cluster.core import FinishReason, FloatArray, Observation, Proposal, TokenArray, TokenTree
from cluster.errors import WorkerError
from cluster.messages import (
    CommitFrame,
    Open,
    ProposalFrame,
    StepFrame,
    StepReport,
    TextName,
    TextVerdict,
    VerdictFrame,
    WorkerDescription,
)
from cluster.plan.texts import NO_SOURCES
from cluster.rpc.duplex import run_until_first_ends
from cluster.rpc.link import Link
from cluster.spec.token_log import prefix_hash

VOCABULARY = 1023  # a multiple of the period
NUM_NODES = 8
TOKENS_PER_ROUND = 3
_WRONG = 400  # distance of the wrong tokens from the right ones
_LENGTHS = 1 << 20


@dataclass(slots=True)
class OwnTime:
    """CPU seconds used by a worker, and the number of rows that it answered."""

    cpu_s: float = 0.0
    num_items: int = 0
    num_nodes: int = 0


def text(start: int, count: int) -> TokenArray:
    """The tokens at positions [start, start + count)."""
    return np.arange(start, start + count, dtype=np.int32) % VOCABULARY


def draft_tree(start: int) -> tuple[TokenTree, FloatArray]:
    """The drafter's tree after `start` tokens: the whole period and one more.

    Inside a period: the rest of it and two more.
    """
    tokens: list[int] = []
    parents: list[int] = []
    survival: list[float] = []

    def add(position: int, parent: int, share: float) -> int:
        tokens.append(position % VOCABULARY)
        parents.append(parent)
        survival.append(share)
        return len(tokens) - 1

    root, reached, position = -1, 1.0, start
    num_periods = 3 if start % TOKENS_PER_ROUND else 2
    for _ in range(num_periods):
        boundary = position - position % TOKENS_PER_ROUND + TOKENS_PER_ROUND
        path = [root]
        for place in range(position, boundary - 1):
            path.append(add(place, path[-1], (0.95 - 0.05 * (len(path) - 1)) * reached))
        for place, parent in zip(range(position, boundary), path, strict=True):
            add(place + _WRONG, parent, 0.6 * reached)
            add(place + _WRONG + 1, parent, 0.6 * reached)
        reached *= 0.5
        root = add(boundary - 1, path[-1], reached)
        position = boundary
    return TokenTree.of(tokens, parents), np.array(survival, dtype=np.float32)


class NullTarget:
    """Steps all open texts, each time after the other tasks have had some turns."""

    def __init__(self, step_time_s: float = 0.02, step_turns: int = 16) -> None:
        """step_time_s: the step time that it reports; it does not really take that long.

        step_turns: turns of the event loop between two steps, so that the drafters answer first.
        """
        self.time = OwnTime()
        self.frames: list[VerdictFrame] = []
        self.keeps_frames = False
        self._step_time_s = step_time_s
        self._step_turns = step_turns
        self._lengths: dict[TextName, int] = {}
        self._opened: dict[TextName, Open] = {}
        self._texts = [text(start, TOKENS_PER_ROUND) for start in range(VOCABULARY)]
        self._sources = np.ones(TOKENS_PER_ROUND - 1, dtype=np.uint32)
        self._serial = 0

    def describe(self, max_sequences: int) -> WorkerDescription:
        return WorkerDescription(
            "null-target", "target", "null", vocab_size=VOCABULARY, max_context_len=_LENGTHS,
            max_running_sequences=max_sequences, max_batch_tokens=_LENGTHS,
        )  # fmt: skip

    async def serve(self, link: Link[VerdictFrame, StepFrame]) -> None:
        await run_until_first_ends(self._read(link), self._step_forever(link))

    async def _read(self, link: Link[VerdictFrame, StepFrame]) -> None:
        async for frame in link:
            start = time.thread_time()
            for name in frame.cancels:
                self._lengths.pop(name, None)
                self._opened.pop(name, None)
            for opened in frame.opens:
                self.open(opened)
            self.time.cpu_s += time.thread_time() - start

    def open(self, opened: Open) -> None:
        """Run a text from now on."""
        name = TextName(opened.request_id, opened.generation)
        self._lengths[name], self._opened[name] = len(opened.token_ids), opened

    async def _step_forever(self, link: Link[VerdictFrame, StepFrame]) -> None:
        while True:
            for _ in range(self._step_turns):
                await asyncio.sleep(0)
            if self._lengths:
                start = time.thread_time()
                frame = self.answer()
                self.time.cpu_s += time.thread_time() - start
                if self.keeps_frames:
                    self.frames.append(frame)
                await link.send(frame)

    def answer(self) -> VerdictFrame:
        """Make one step."""
        self._serial += 1
        verdicts = tuple(map(self._verdict, list(self._lengths)))
        num_nodes = sum(verdict.num_nodes for verdict in verdicts)
        self.time.num_items += len(verdicts)
        self.time.num_nodes += num_nodes
        report = StepReport(
            self._step_time_s, 0.9 * self._step_time_s, num_sequences=len(verdicts),
            num_nodes=num_nodes, pages_in_use=1, pages_total=_LENGTHS,
        )  # fmt: skip
        return VerdictFrame(verdicts, report=report, serial=self._serial)

    def _verdict(self, name: TextName) -> TextVerdict:
        length, opened = self._lengths[name], self._opened[name]
        is_drafted = len(opened.drafters) > 0
        emitted = self._texts[length % VOCABULARY][: None if is_drafted else 1]
        emitted = emitted[: opened.max_len - length]
        self._lengths[name] = length + len(emitted)
        is_over = self._lengths[name] >= opened.max_len
        if is_over:
            del self._lengths[name], self._opened[name]
        reason = FinishReason.LENGTH if is_over else None
        if not is_drafted:
            return TextVerdict(
                name.request_id, name.generation, length, emitted, NO_SOURCES, finish_reason=reason
            )
        return TextVerdict(
            name.request_id, name.generation, length, emitted, self._sources,
            (0,) * len(self._sources), NUM_NODES, (NUM_NODES,), (NUM_NODES,), finish_reason=reason,
        )  # fmt: skip


@dataclass(slots=True)
class _Known:
    length: int
    hash: int


@dataclass
class NullDrafter:
    """Answers every commit with the tree for its length."""

    name: str
    time: OwnTime = field(default_factory=OwnTime)

    def __post_init__(self) -> None:
        self._trees = [draft_tree(start) for start in range(VOCABULARY)]
        self._known: dict[str, _Known] = {}

    def describe(self) -> WorkerDescription:
        return WorkerDescription(f"null-{self.name}", "drafter", self.name)

    async def serve(self, link: Link[ProposalFrame, CommitFrame]) -> None:
        try:
            async for frame in link:
                start = time.thread_time()
                answer = self.answer(frame)
                self.time.cpu_s += time.thread_time() - start
                await link.send(answer)
        except WorkerError:
            return

    def answer(self, frame: CommitFrame) -> ProposalFrame:
        for request_id in frame.released:
            self._known.pop(request_id, None)
        proposals, observations = [], []
        for commit in frame.commits:
            length = commit.base_len + len(commit.token_ids)
            end = prefix_hash(commit.token_ids.tolist(), commit.prefix_hash)
            self._known[commit.request_id] = _Known(length, end)
            tree, survival = self._trees[length % VOCABULARY]
            proposals.append(
                Proposal(commit.request_id, commit.generation, length, end, tree, survival)
            )
            observations.append(Observation(commit.request_id, commit.generation, length, 0.5))
        self.time.num_items += len(proposals)
        return ProposalFrame(tuple(proposals), tuple(observations), num_requests=len(self._known))
