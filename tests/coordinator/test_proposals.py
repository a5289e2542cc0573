"""Of what a drafter proposes, only trees for the very tokens that were committed are verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.coordinator.proposals import keep_newest
from cluster.coordinator.session import Session
from cluster.core import Proposal, SpeculationStats, TokenTree
from cluster.spec.tree_check import problem_in_text
from cluster.token_log import prefix_hash
from tests.support.coordinator.house import GREEDY, collect, house, request, text_of
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_chain, plain_text

Spoil = Callable[[Proposal], Proposal]


async def serve_with(spoil: Spoil) -> tuple[SpeculationStats, str]:
    """What one drafter did for a request, and how its breaker stands after it."""
    async with house(drafters=("a",), breaker_failures=1) as stage:
        stage.add_target(ToyTarget())
        stage.add_drafter(ToyDrafter("a", oracle_chain(), spoil=spoil))
        events = await collect(stage.coordinator, request())
        assert text_of(events) == plain_text([1, 2, 3], GREEDY)
        stats = events[-1].stats
        assert stats is not None
        return stats, stage.coordinator.status()["drafters"][0]["breaker"]


async def test_an_honest_tree_is_verified() -> None:
    stats, breaker = await serve_with(lambda proposal: proposal)
    assert stats.num_accepted_draft_tokens > 0
    assert breaker == "closed"


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda each: replace(each, prefix_hash=each.prefix_hash ^ 1), id="hash"),
        pytest.param(lambda each: replace(each, base_len=each.base_len + 10_000), id="too long"),
        pytest.param(lambda each: replace(each, base_len=each.base_len - 1), id="too short"),
    ],
)
async def test_a_tree_for_other_tokens_is_not_verified_though_it_would_be_accepted(
    spoil: Spoil,
) -> None:
    stats, breaker = await serve_with(spoil)
    assert stats.num_draft_tokens == 0
    assert breaker == "open"


def proposal(base_len: int, token: int = 7, **fields: Any) -> Proposal:
    tree, survival = TokenTree.chain([token]), np.array([0.5], np.float32)
    fields.setdefault("prefix_hash", prefix_hash([1, 2, 3][:base_len]))
    return Proposal("r", 0, base_len, tree=tree, survival=survival, **fields)


@pytest.mark.parametrize("base_len", [0, 1, 3])
def test_a_proposal_for_any_prefix_of_the_text_is_taken(base_len: int) -> None:
    session = Session("r", request(), lambda event: None, 0, 0.0)
    assert problem_in_text(proposal(base_len), session.tokens) is None


def test_what_is_wrong_with_a_proposal_is_said_with_its_values() -> None:
    session = Session("r", request(), lambda event: None, 0, 0.0)
    too_long = problem_in_text(proposal(4, prefix_hash=0), session.tokens)
    assert too_long == "base_len 4 lies beyond the 3 committed tokens"
    other_text = problem_in_text(proposal(2, prefix_hash=prefix_hash([1, 3])), session.tokens)
    assert other_text == "the prefix hash at 2 is not that of the committed tokens"


def test_the_newest_tree_is_kept_and_one_that_was_overtaken_is_not() -> None:
    session = Session("r", request(), lambda event: None, 0, 0.0)
    kept = []
    for base_len, token in [(2, 10), (3, 11), (2, 12), (3, 13)]:
        keep_newest(session, "a", proposal(base_len, token))
        held = session.held["a"]
        assert held.survival.tolist() == [0.5]
        kept.append((held.base_len, held.proposed_len, held.tree.token_ids.tolist()))
    assert kept == [(2, 2, [10]), (3, 3, [11]), (3, 3, [11]), (3, 3, [13])]
