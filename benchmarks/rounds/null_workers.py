"""A target and a drafter with almost no cost, for measuring the coordinator.

The text is fixed: the token at position p is p modulo VOCABULARY.  It is drafted in periods of
three positions with nine nodes each: the first two tokens, six wrong tokens beside the three, and
the third token, whose survival is just below that of the other eight.  So a step of eight draft
nodes at the start of a period accepts two, emits three tokens, and ends at the third node, below
which the next period is already drafted: every round has the cost of a pre-drafted hit.  Periods
begin at multiples of three, so that a sequence that is out of step (its first round has no drafts)
is in step again one round later.  Everything that depends only on the position is computed once.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np

from cluster.core import (
    FloatArray,
    Observation,
    Proposal,
    TokenArray,
    TokenTree,
    Verdict,
    VerifyItem,
)
from cluster.errors import WorkerError
from cluster.messages import (
    CommitFrame,
    ProposalFrame,
    StepReport,
    VerdictFrame,
    VerifyFrame,
    WorkerDescription,
)
from cluster.rpc.link import Link
from cluster.spec.verify import walk_draws
from cluster.token_log import prefix_hash

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
    """Answers every frame at once with the tokens of the text."""

    def __init__(self, step_time_s: float = 0.02, step_turns: int = 16) -> None:
        """step_time_s: the step time it reports, without taking it.

        step_turns: turns of the event loop before it answers, so that the drafters answer first.
        """
        self.time = OwnTime()
        self.frames: list[tuple[VerifyFrame, VerdictFrame]] = []
        self.keeps_frames = False
        self._step_time_s = step_time_s
        self._step_turns = step_turns
        self._texts = [text(start, NUM_NODES + 1) for start in range(VOCABULARY)]
        self._path = np.array([0, 1], dtype=np.int32)

    def describe(self, max_sequences: int) -> WorkerDescription:
        return WorkerDescription(
            "null-target", "target", "null", vocab_size=VOCABULARY, max_context_len=_LENGTHS,
            max_running_sequences=max_sequences, max_batch_tokens=_LENGTHS,
        )  # fmt: skip

    async def serve(self, link: Link[VerdictFrame, VerifyFrame]) -> None:
        try:
            async for frame in link:
                start = time.thread_time()
                answer = self.answer(frame)
                self.time.cpu_s += time.thread_time() - start
                if self.keeps_frames and frame.items:
                    self.frames.append((frame, answer))
                for _ in range(self._step_turns):
                    await asyncio.sleep(0)
                await link.send(answer)
        except WorkerError:
            return

    def answer(self, frame: VerifyFrame) -> VerdictFrame:
        verdicts = tuple([self._verdict(item) for item in frame.items])
        num_nodes = sum([len(item.tree.token_ids) for item in frame.items])
        self.time.num_items += len(verdicts)
        self.time.num_nodes += num_nodes
        step_time_s = self._step_time_s if verdicts else 0.0
        report = StepReport(
            step_time_s, 0.9 * step_time_s, 0.0, len(verdicts), num_nodes, 0, 1, _LENGTHS
        )
        return VerdictFrame(verdicts, (), (), report)

    def _verdict(self, item: VerifyItem) -> Verdict:
        length = item.context_len
        upcoming = self._texts[length % VOCABULARY]
        ids = item.tree.token_ids
        expected = len(ids) == NUM_NODES and ids[0] == upcoming[0] and ids[1] == upcoming[1]
        if expected and upcoming[2] not in ids:
            path, emitted = self._path, upcoming[:TOKENS_PER_ROUND]
        else:
            path, emitted = self._walk(item.tree, upcoming)
        return Verdict(item.request_id, item.generation, length, path, emitted)

    def _walk(self, tree: TokenTree, upcoming: TokenArray) -> tuple[TokenArray, TokenArray]:
        """Walk any other tree with the ordinary code."""
        depth: list[int] = []
        for parent in tree.parents.tolist():
            depth.append(1 + (depth[parent] if parent >= 0 else 0))
        draws = [int(upcoming[0]), *((int(upcoming[0]) + d) % VOCABULARY for d in depth)]
        return walk_draws(tree, np.array(draws, dtype=np.int32))


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
