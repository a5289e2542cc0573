"""How much is asked of the pool's drafters, and how often they hear of a text."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cluster.config.schema import Config, CoordinatorConfig
from cluster.coordinator.pool_scores import PoolScores
from cluster.core import TokenTree, token_array
from cluster.plan.texts import Text
from cluster.spec.held_trees import Seen
from cluster.spec.token_log import TokenLog

GROUP = ("default", False)
FIXED = Config(coordinator=CoordinatorConfig(budget="fixed"))


def text() -> Text:
    made = Text("r", GROUP, TokenLog(token_array([5])))
    made.max_draft_tokens = 8
    return made


@pytest.mark.parametrize(
    ("num_texts", "is_shared", "lag"),
    [(1, False, 1), (6, False, 3), (64, False, 8), (1, True, 8), (64, True, 8)],
)
def test_drafters_hear_of_every_step_while_theirs_are_verified_and_of_fewer_else(
    num_texts: int, is_shared: bool, lag: int
) -> None:
    scores, own = PoolScores(Config()), text()
    for _ in range(8):
        assert scores.commit_lag(own, "a", num_texts, is_shared=is_shared) == 1
        own.stepped(("b",))
    assert scores.commit_lag(own, "a", num_texts, is_shared=is_shared) == lag
    assert scores.commit_lag(own, "b", num_texts, is_shared=is_shared) == 1
    for _ in range(200):
        own.stepped(("b",))
    found = scores.commit_lag(own, "a", num_texts, is_shared=is_shared)
    assert found == (64 if is_shared else lag)
    fixed = PoolScores(FIXED)
    assert fixed.commit_lag(own, "a", num_texts, is_shared=is_shared) == 1


def test_look_ups_are_asked_for_less_of_each_text_in_a_crowd_and_models_are_not() -> None:
    scores, own = PoolScores(Config()), text()
    asked = [scores.ask(own, count, is_model=False) for count in (0, 1, 16, 10_000)]
    assert asked == [64, 64, 32, 1]
    assert scores.ask(own, 10_000, is_model=True) == 64
    assert PoolScores(FIXED).ask(own, 10_000, is_model=False) == 64
    own.max_draft_tokens = 0
    assert scores.ask(own, 1, is_model=True) == scores.ask(own, 1, is_model=False) == 0


def test_what_was_learned_outlives_a_restart() -> None:
    before, after, own = PoolScores(Config()), PoolScores(Config()), text()
    tree, survival = TokenTree.chain([1, 1]), np.array([0.9, 0.8], np.float32)
    for _ in range(30):
        own.seen.append(Seen("a", GROUP, len(own.tokens), tree, survival))
        own.tokens.append(token_array([1, 9]))
        before.score([own])
    after.restore(json.loads(json.dumps(before.export())))
    assert before.acceptance.score("a", GROUP).num_trees > 20
    assert after.acceptance.table() == before.acceptance.table() != []
