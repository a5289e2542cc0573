"""Runs a drafter along a recorded text, which measures its acceptance without a target.

The target's text does not depend on the drafts, so one recording serves for tuning, tests and
benchmarks of any drafter.  Rounds are synchronous: the drafter grows its tree until it is
complete, then the recorded text decides what is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.core import (
    EMPTY_TOKENS,
    Commit,
    Proposal,
    SamplingParams,
    TokenArray,
    TokenLogprob,
    token_array,
)
from cluster.draft.base import Drafter, DraftTask
from cluster.draft.inside import WANTS_NOTHING, StepReader, StepRows
from cluster.errors import ProtocolError
from cluster.records import frozen, record
from cluster.spec.logprobs import TopTokens
from cluster.spec.token_log import TokenLog
from cluster.spec.tree import walk
from cluster.spec.tree_check import ANY_VOCABULARY, problem_in_text, problems_of_proposals

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
    """

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_predicted: float = 0.0

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
        )


# Called with a proposal and the last node of its tree that was accepted, -1 = none.
Judge = Callable[[Proposal, int], None]


def replay(
    drafter: Drafter,
    recording: Recording,
    max_nodes: int,
    request_id: str = "replay",
    judge: Judge | None = None,
) -> ReplayStats:
    """Draft along `recording` and release the request afterwards.

    judge: called with each round's proposal.

    Raises ProtocolError if the drafter violates its protocol: a proposal for another text, a tree
    that is invalid or above max_nodes, an observation that does not match the commit.
    """
    led, stats = Led(drafter, recording, max_nodes, request_id), ReplayStats()
    output_ids = recording.output_ids.tolist()
    try:
        led.begin()
        while led.position < len(output_ids) - 1:
            proposal = led.tree()
            accepted = 0
            if proposal is not None:
                path = walk(proposal.tree, output_ids[led.position : len(output_ids) - 1])
                node, accepted = path[-1] if path else -1, len(path)
                if judge is not None:
                    judge(proposal, node)
            stats += ReplayStats(
                num_rounds=1,
                num_draft_tokens=len(proposal.tree) if proposal else 0,
                num_accepted=accepted,
                num_predicted=float(proposal.survival.sum()) if proposal else 0.0,
            )
            led.go_on(accepted + 1)
    finally:
        drafter.release([request_id])
    return stats


@dataclass(slots=True)
class Led:
    """A drafter that is led along a recorded text.

    told: prompt and output tokens sent to it so far; position: those of the output.
    """

    drafter: Drafter
    recording: Recording
    max_nodes: int
    request_id: str
    told: TokenLog = field(default_factory=TokenLog)
    position: int = 0

    def begin(self) -> None:
        """Commit the prompt."""
        self._commit(self.recording.prompt_ids)

    def go_on(self, num_tokens: int) -> None:
        """Commit so many tokens of the output; before, a reader of steps gets their rows."""
        first, self.position = self.position, self.position + num_tokens
        if isinstance(self.drafter, StepReader) and self.drafter.wants != WANTS_NOTHING:
            rows = range(first, self.position)
            self.drafter.read([self.recording.row(self.request_id, row) for row in rows])
        self._commit(self.recording.output_ids[first : self.position])

    def _commit(self, token_ids: TokenArray) -> None:
        base_len = len(self.told)
        commit = Commit(
            self.request_id,
            generation=1,
            base_len=base_len,
            prefix_hash=self.told.hash_at(base_len),
            token_ids=token_ids,
            prompt_len=len(self.recording.prompt_ids),
            max_nodes=self.max_nodes,
            task=self.recording.task,
            params=self.recording.params if base_len == 0 else None,
        )
        (observation,) = self.drafter.observe([commit])
        self.told.append(token_ids)
        if observation.have_len != len(self.told):
            raise ProtocolError(
                f"the drafter was sent {len(self.told)} tokens and reports "
                f"{observation.have_len}; replay with a drafter that has room and an unused id"
            )

    def tree(self) -> Proposal | None:
        """The newest proposal once nothing is left to grow, None if there is none."""
        newest: Proposal | None = None
        for _ in range(_MAX_SLICES):
            proposals = self.drafter.propose([DraftTask(self.request_id, 1, self.max_nodes)])
            if not proposals:
                return newest
            newest = proposals[-1]
            self._check(newest)
        raise ProtocolError(f"the drafter still grows after {_MAX_SLICES} slices of one round")

    def _check(self, proposal: Proposal) -> None:
        (problem,) = problems_of_proposals([proposal], ANY_VOCABULARY)
        if problem := problem or problem_in_text(proposal, self.told):
            raise ProtocolError(problem)
        if proposal.base_len != len(self.told):
            raise ProtocolError(
                f"a proposal continues {proposal.base_len} tokens, {len(self.told)} are "
                "committed; proposals are for the newest text"
            )
        if len(proposal.tree) > self.max_nodes:
            raise ProtocolError(
                f"a proposal has {len(proposal.tree)} nodes, the task allows {self.max_nodes}"
            )
