from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.replay.along import Recording, ReplayStats, replay
from cluster.core import Commit, DraftTask, Observation, Proposal, TokenTree, token_array
from cluster.errors import ProtocolError
from tests.support.draft.author import GREEDY

TEXT = list(range(100, 131))
RECORDING = Recording(token_array([1, 2, 3]), token_array(TEXT), GREEDY)


class KnowsTheText:
    """Proposes the next `length` tokens of the recording, one slice per node."""

    def __init__(self, length: int, shift: int = 0) -> None:
        self.length = length
        self.shift = shift
        self.have = 0
        self.hash = 0
        self.slices = 0
        self.released: list[str] = []

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        from cluster.spec.token_log import prefix_hash

        (commit,) = commits
        self.have = commit.base_len + len(commit.token_ids)
        self.hash = prefix_hash(commit.token_ids, commit.prefix_hash)
        self.slices = 0
        return [Observation(commit.request_id, commit.generation, self.have)]

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        (task,) = tasks
        self.slices += 1
        start = self.have - 3
        chain = TokenTree.chain(TEXT[start : start + min(self.slices, self.length)])
        if self.slices > self.length or len(chain) == 0:
            return []
        survival = np.full(len(chain), 0.9, dtype=np.float32)
        base_len = self.have + self.shift
        return [Proposal(task.request_id, 1, base_len, self.hash, chain, survival)]

    def release(self, request_ids: Sequence[str]) -> None:
        self.released.extend(request_ids)


def test_perfect_drafts_are_accepted_completely() -> None:
    drafter = KnowsTheText(4)
    stats = replay(drafter, RECORDING, max_nodes=4)
    assert stats.num_rounds == 6, "31 tokens at 5 a round; the last one is drawn in any case"
    assert stats.num_accepted == stats.num_draft_tokens == 24
    assert stats.mean_acceptance_length == 5.0
    assert stats.num_predicted == pytest.approx(0.9 * 24)
    assert drafter.released == ["replay"]


def test_fewer_slices_lower_the_acceptance() -> None:
    stats = replay(KnowsTheText(4), RECORDING, max_nodes=4, max_slices=2)
    assert stats.mean_acceptance_length == 3.0


def test_statistics_add_up() -> None:
    once = replay(KnowsTheText(4), RECORDING, max_nodes=4)
    twice = once + once
    assert twice.num_rounds == 2 * once.num_rounds
    assert twice.mean_acceptance_length == once.mean_acceptance_length
    assert ReplayStats().mean_acceptance_length == 1.0


def test_a_drafter_that_breaks_the_protocol_is_named() -> None:
    with pytest.raises(ProtocolError, match="proposals are for the newest text"):
        replay(KnowsTheText(4, shift=1), RECORDING, max_nodes=4)
    with pytest.raises(ProtocolError, match="4 nodes, the task allows 3"):
        replay(KnowsTheText(4), RECORDING, max_nodes=3)
    forgetful = KnowsTheText(4)
    answer = forgetful.observe
    forgetful.observe = lambda commits: [  # type: ignore[method-assign]
        dataclasses.replace(each, have_len=0) for each in answer(commits)
    ]
    with pytest.raises(ProtocolError, match="reports 0"):
        replay(forgetful, RECORDING, max_nodes=4)
    assert forgetful.released == ["replay"]
