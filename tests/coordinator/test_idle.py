"""Why a request had no speculative step."""

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.schema import Config
from cluster.coordinator.sessions import idle_reason
from cluster.core import SpeculationOptions
from cluster.requests.fields import PlainWhy
from cluster.requests.idle import MEANINGS, IdleReason
from tests.support.coordinator.house import session

BOTH = set("ab")
WHYS = (PlainWhy.GUARD, PlainWhy.NOT_WORTH_IT, PlainWhy.NO_DRAFTS)


def said(
    names: Any = BOTH,
    refused: Any = (),
    usable: Any = (),
    seen: Any = (),
    uptime_s: float = 0.0,
    steps: Any = (),
    most: int = 8,
) -> str:
    """What is said of a request that these drafters may serve, with at most so many drafts."""
    asked = session(speculation=SpeculationOptions(drafters=tuple(names)))
    asked.text.max_draft_tokens = most
    asked.plain_steps.update({PlainWhy.NONE: 100, **dict(zip(WHYS, steps, strict=False))})
    present = SimpleNamespace(config=Config(), refused=dict.fromkeys(refused))
    pool = SimpleNamespace(usable=lambda: usable, seen=seen)
    return idle_reason(asked, present, pool, uptime_s)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"names": ()}, "no_drafter_for_model"),
        ({"refused": BOTH}, "no_drafter_for_model"),
        ({"refused": {"a"}}, "warming_up"),
        ({"uptime_s": 60.0}, "warming_up"),
        ({"uptime_s": 180.0}, "drafters_down"),
        ({"seen": {"a"}, "refused": {"b"}}, "drafters_down"),
        ({"usable": {"another"}, "seen": {"another"}}, "warming_up"),
        ({"usable": BOTH, "most": 0}, "disabled"),
        ({"usable": {"a"}}, "too_short"),
        ({"usable": {"a"}, "steps": (5, 1, 2)}, "paused"),
        ({"usable": {"a"}, "steps": (1, 5, 2)}, "not_worth_it"),
        ({"usable": {"a"}, "steps": (1, 2, 5)}, "no_drafts"),
    ],
)
def test_of_several_reasons_the_one_of_most_steps_is_said(known: dict[str, Any], expected: str):
    assert said(**known) == expected


def test_every_reason_has_a_meaning_of_its_own():
    assert set(MEANINGS) == set(IdleReason)
    assert len(set(MEANINGS.values())) == len(IdleReason)
