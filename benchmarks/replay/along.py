"""Runs a drafter along a recorded text, which measures its acceptance without a target.

The target's text does not depend on the drafts, so one recording serves for tuning, tests and
benchmarks of any drafter.  Rounds are synchronous: the drafter grows its tree until it is complete
(or for a given number of slices), then the recorded text decides what is accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from cluster.core import (
    EMPTY_TOKENS,
    Commit,
    DraftTask,
    Proposal,
    SamplingParams,
    TokenArray,
    TokenLogprob,
    token_array,
)
from cluster.draft.base import Drafter
from cluster.draft.inside import WANTS_NOTHING, StepReader, StepRows
from cluster.errors import ProtocolError
from cluster.records import frozen, record
from cluster.spec.logprobs import TopTokens
from cluster.spec.token_log import prefix_hash
from cluster.spec.tree import walk
from cluster.spec.tree_check import ANY_VOCABULARY, problems_of_proposals

# A drafter that still grows after this many slices of one round is broken.
_MAX_SLICES = 10_000


@record
class Recording:
    """The output of a target for a prompt under `params`.

    likely: the target's most probable tokens at each place, for drafters that read them; () where
    they were not asked for.
    """

    prompt_ids: TokenArray
    output_ids: TokenArray
    params: SamplingParams
    task: str = "default"
    likely: Sequence[TokenLogprob] = ()

    def row(self, request_id: str, position: int) -> StepRows:
        """The target's row behind which it drew the output's token `position`."""
        last = self.output_ids[position - 1 : position] if position else self.prompt_ids[-1:]
        token_ids, logprobs = zip(*self.likely[position].top, strict=True)
        top = TopTokens(token_array(token_ids)[None], np.array([logprobs], dtype=np.float32))
        return StepRows(
            request_id,
            1,
            self.task,
            b"",
            len(self.prompt_ids) + position - 1,
            last,
            1,
            EMPTY_TOKENS,
            EMPTY_TOKENS,
            int(self.output_ids[position]),
            top=top,
        )


@frozen
class ReplayStats:
    """Sums over rounds; statistics of several recordings can be added.

    num_rounds: rounds that could accept a draft (all but those for a last token).
    num_predicted: sum of the survivals that the drafter claimed; compare with num_accepted.
    root_hits, root_commits: of the drafter's commits, 0 if it does not count them.
    """

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_predicted: float = 0.0
    root_hits: int = 0
    root_commits: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, including the target's own token."""
        return 1.0 + self.num_accepted / max(self.num_rounds, 1)

    def __add__(self, other: ReplayStats) -> ReplayStats:
        return ReplayStats(
            self.num_rounds + other.num_rounds,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted + other.num_accepted,
            self.num_predicted + other.num_predicted,
            self.root_hits + other.root_hits,
            self.root_commits + other.root_commits,
        )


# Called with a proposal and the last node of its tree that was accepted, -1 = none.
Judge = Callable[[Proposal, int], None]


@runtime_checkable
class CountsRoots(Protocol):
    """Optional protocol for drafters that count root hits."""

    @property
    def root_hits(self) -> Counter[bool]: ...


def replay(
    drafter: Drafter,
    recording: Recording,
    max_nodes: int,
    max_slices: int = _MAX_SLICES,
    request_id: str = "replay",
    judge: Judge | None = None,
) -> ReplayStats:
    """Draft along `recording` and release the request afterwards.

    judge: called with each round's proposal.

    Raises ProtocolError if the drafter violates its protocol: a proposal for another text, a tree
    that is invalid or above max_nodes, an observation that does not match the commit.
    """
    counts = drafter.root_hits if isinstance(drafter, CountsRoots) else Counter[bool]()
    hits, commits = counts[True], counts.total()
    replayer = _Replay(drafter, recording, max_nodes, max_slices, request_id, judge)
    try:
        stats = replayer.run()
    finally:
        drafter.release([request_id])
    return stats + ReplayStats(root_hits=counts[True] - hits, root_commits=counts.total() - commits)


class _Replay:
    """One running replay.  _committed: prompt and output tokens sent to the drafter so far."""

    def __init__(
        self,
        drafter: Drafter,
        recording: Recording,
        max_nodes: int,
        max_slices: int,
        request_id: str,
        judge: Judge | None,
    ) -> None:
        self._drafter = drafter
        self._judge = judge
        self._recording = recording
        self._max_nodes = max_nodes
        self._max_slices = max_slices
        self._request_id = request_id
        self._prompt_len = len(recording.prompt_ids)
        self._committed: list[int] = []
        self._hash = 0
        self._stats = ReplayStats()

    def run(self) -> ReplayStats:
        output_ids = self._recording.output_ids.tolist()
        self._commit(self._recording.prompt_ids.tolist())
        position = 0
        while position < len(output_ids) - 1:
            proposal = self._grow()
            accepted = 0
            if proposal is not None:
                path = walk(proposal.tree, output_ids[position : len(output_ids) - 1])
                node, accepted = path[-1] if path else -1, len(path)
                if self._judge is not None:
                    self._judge(proposal, node)
            self._stats += ReplayStats(
                num_rounds=1,
                num_draft_tokens=len(proposal.tree) if proposal else 0,
                num_accepted=accepted,
                num_predicted=float(proposal.survival.sum()) if proposal else 0.0,
            )
            if isinstance(self._drafter, StepReader) and self._drafter.wants != WANTS_NOTHING:
                rows = range(position, position + accepted + 1)
                self._drafter.read([self._recording.row(self._request_id, row) for row in rows])
            self._commit(output_ids[position : position + accepted + 1])
            position += accepted + 1
        return self._stats

    def _commit(self, token_ids: Sequence[int]) -> None:
        base_len = len(self._committed)
        commit = Commit(
            self._request_id,
            generation=1,
            base_len=base_len,
            prefix_hash=self._hash,
            token_ids=token_array(token_ids) if token_ids else EMPTY_TOKENS,
            prompt_len=self._prompt_len,
            max_nodes=self._max_nodes,
            task=self._recording.task,
            params=self._recording.params if base_len == 0 else None,
        )
        (observation,) = self._drafter.observe([commit])
        self._committed.extend(token_ids)
        self._hash = prefix_hash(token_ids, self._hash)
        if observation.have_len != len(self._committed):
            raise ProtocolError(
                f"the drafter was sent {len(self._committed)} tokens and reports "
                f"{observation.have_len}; replay with a drafter that has room and an unused id"
            )

    def _grow(self) -> Proposal | None:
        """The newest proposal after at most `max_slices` slices, None if there is none."""
        newest: Proposal | None = None
        for _ in range(self._max_slices):
            proposals = self._drafter.propose([DraftTask(self._request_id, 1, self._max_nodes)])
            if not proposals:
                return newest
            newest = proposals[-1]
            self._check(newest)
        if self._max_slices == _MAX_SLICES:
            raise ProtocolError(f"the drafter still grows after {_MAX_SLICES} slices of one round")
        return newest

    def _check(self, proposal: Proposal) -> None:
        (problem,) = problems_of_proposals([proposal], ANY_VOCABULARY)
        if problem is not None:
            raise ProtocolError(problem)
        if proposal.base_len != len(self._committed) or proposal.prefix_hash != self._hash:
            raise ProtocolError(
                f"a proposal continues {proposal.base_len} tokens, {len(self._committed)} are "
                "committed; proposals are for the newest text"
            )
        if len(proposal.tree) > self._max_nodes:
            raise ProtocolError(
                f"a proposal has {len(proposal.tree)} nodes, the task allows {self._max_nodes}"
            )
