"""How much is asked of the pool's drafters, and how often they hear of a text."""

import pytest

from cluster.config.schema import Config, CoordinatorConfig
from cluster.coordinator.pool_scores import PoolScores
from tests.support.plan.played import text_of

FIXED = Config(coordinator=CoordinatorConfig(budget="fixed"))


@pytest.mark.parametrize(
    ("num_texts", "is_shared", "lag", "most"),
    [(1, False, 1, 1), (6, False, 3, 3), (64, False, 8, 8), (1, True, 8, 64), (64, True, 8, 64)],
)
def test_drafters_hear_of_every_step_while_theirs_are_verified_and_of_fewer_else(
    num_texts: int, is_shared: bool, lag: int, most: int
):
    scores, own = PoolScores(Config()), text_of("r")
    for num_unused, expected in ((0, 1), (7, 1), (8, lag), (208, most)):
        found = scores.commit_lag(own, "a", num_unused, num_texts, is_shared=is_shared)
        assert found == expected
    fixed = PoolScores(FIXED)
    assert fixed.commit_lag(own, "a", 208, num_texts, is_shared=is_shared) == 1


def test_look_ups_are_asked_for_less_of_each_text_in_a_crowd_and_models_are_not():
    scores, own = PoolScores(Config()), text_of("r")
    asked = [scores.ask(own, count, is_model=False) for count in (1, 16, 10_000)]
    assert asked == [64, 32, 1]
    assert scores.ask(own, 10_000, is_model=True) == 64
    assert PoolScores(FIXED).ask(own, 10_000, is_model=False) == 64
    own.max_draft_tokens = 0
    assert scores.ask(own, 1, is_model=True) == scores.ask(own, 1, is_model=False) == 0
