"""Why a request had no speculative step."""

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.schema import Config
from cluster.coordinator.idle import MEANINGS, IdleReason
from cluster.coordinator.sessions import idle_reason
from cluster.core import SpeculationOptions
from cluster.requests.fields import PlainWhy
from tests.support.coordinator.house import session

NONE = frozenset()
BOTH = frozenset("ab")
NOTHING: dict[str, Any] = {
    "is_enabled": True,
    "names": BOTH,
    "refused": NONE,
    "usable": NONE,
    "seen": NONE,
    "uptime_s": 0.0,
}


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"names": NONE}, "no_drafter_for_model"),
        ({"refused": BOTH}, "no_drafter_for_model"),
        ({"refused": {"a"}}, "warming_up"),
        ({"uptime_s": 60.0}, "warming_up"),
        ({"uptime_s": 180.0}, "drafters_down"),
        ({"seen": {"a"}, "refused": {"b"}}, "drafters_down"),
        ({"usable": {"another"}, "seen": {"another"}}, "warming_up"),
        ({"usable": BOTH, "is_enabled": False}, "disabled"),
        ({"usable": {"a"}}, "too_short"),
        ({"usable": {"a"}, "steps": (5, 1, 2)}, "paused"),
        ({"usable": {"a"}, "steps": (1, 5, 2)}, "not_worth_it"),
        ({"usable": {"a"}, "steps": (1, 2, 5)}, "no_drafts"),
    ],
)
def test_of_several_reasons_the_one_of_most_steps_is_said(known: dict[str, Any], expected: str):
    whys = (PlainWhy.GUARD, PlainWhy.NOT_WORTH_IT, PlainWhy.NO_DRAFTS)
    counts = dict(zip(whys, known.get("steps", ()), strict=False))
    given = SimpleNamespace(**NOTHING | known)
    asked = session(speculation=SpeculationOptions(drafters=tuple(given.names)))
    asked.text.max_draft_tokens = 8 * given.is_enabled
    asked.plain_steps.update({PlainWhy.NONE: 100, **counts})
    present = SimpleNamespace(config=Config(), refused=dict.fromkeys(given.refused))
    pool = SimpleNamespace(usable=lambda: given.usable, seen=given.seen)
    assert idle_reason(asked, present, pool, given.uptime_s) == expected


def test_every_reason_has_a_meaning_of_its_own():
    assert set(MEANINGS) == set(IdleReason)
    assert len(set(MEANINGS.values())) == len(IdleReason)
