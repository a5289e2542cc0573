"""How much a drafter of the pool is told of a text, and asked for."""

from types import SimpleNamespace

import pytest

from cluster.config.schema import CoordinatorConfig
from cluster.coordinator.replica import Subscription
from cluster.core import token_array
from cluster.plan.texts import NO_SOURCES
from cluster.rpc.messages import TextVerdict
from tests.support.coordinator.house import session

ADAPTIVE, FIXED = CoordinatorConfig(), CoordinatorConfig(budget="fixed")


def subscription(model_hash: str = "", **fields: int) -> Subscription:
    own = session()
    own.text.max_draft_tokens = 8
    replica = SimpleNamespace(name="a", description=SimpleNamespace(model_hash=model_hash))
    return Subscription(own, replica, **fields)


def test_steps_are_counted_since_a_draft_of_each_was_last_verified():
    own = session()
    own.text.names = ("a", "b")
    own.subscriptions = {name: SimpleNamespace(num_unused=3) for name in own.text.names}
    own.count(TextVerdict(own.id, 0, 3, token_array([5]), NO_SOURCES, verified=(2, 0)), 1.0)
    assert [each.num_unused for each in own.subscriptions.values()] == [0, 4]


@pytest.mark.parametrize(
    ("num_texts", "is_shared", "lag", "most"),
    [(1, False, 1, 1), (6, False, 3, 3), (64, False, 8, 8), (1, True, 8, 64), (64, True, 8, 64)],
)
def test_drafters_hear_of_every_step_while_theirs_are_verified_and_of_fewer_else(
    num_texts: int, is_shared: bool, lag: int, most: int
):
    for num_unused, expected in ((0, 1), (7, 1), (8, lag), (208, most)):
        own = subscription(num_unused=num_unused)
        assert own.commit_lag(ADAPTIVE, num_texts, is_shared=is_shared) == expected
    assert own.commit_lag(FIXED, num_texts, is_shared=is_shared) == 1


def test_look_ups_are_asked_for_less_of_each_text_in_a_crowd_and_models_are_not():
    own, model = subscription(), subscription("1")
    assert [own.nodes_to_ask(ADAPTIVE, count) for count in (1, 16, 10_000)] == [64, 32, 1]
    assert model.nodes_to_ask(ADAPTIVE, 10_000) == own.nodes_to_ask(FIXED, 10_000) == 64
    for each in (own, model):
        each.session.text.max_draft_tokens = 0
        assert each.nodes_to_ask(ADAPTIVE, 1) == 0
