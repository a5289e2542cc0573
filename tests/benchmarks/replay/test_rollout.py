"""In virtual time a better drafter comes to serve, a worse one never, and a poisoned one goes.

The texts and drafters are made by hand: nothing here says how good any drafter is.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.replay.rollout import MAX_PLACES_OF_POISON, Scene, play, spoiled
from benchmarks.replay.synthetic import texts
from cluster.plan.candidate import Phase
from cluster.simulate.texts import RecordedText
from cluster.simulate.world import recorded

GOOD = recorded("lm")
POOR = spoiled(GOOD, 0.4, 1)
# Of the requests: ten times the usual share, so that less time need be played.
SHARE = 0.5


@pytest.fixture(scope="module")
def written() -> list[RecordedText]:
    return texts(24, 60, agreement=0.7)


def test_a_better_drafter_serves_within_ten_minutes_of_four_streams(
    written: Sequence[RecordedText],
) -> None:
    played = play(Scene("better", GOOD, POOR, Phase.ACTIVE), written, 0, share=SHARE)
    assert played.is_right
    assert 0.0 < played.reached_s[Phase.CANARY] < played.reached_s[Phase.ACTIVE] < 600.0


def test_a_worse_drafter_is_verified_nowhere(written: Sequence[RecordedText]) -> None:
    played = play(Scene("worse", POOR, GOOD), written, 0, seconds=10.0, share=SHARE)
    assert played.reached_s == {}


@pytest.mark.parametrize("phase", [Phase.CANARY, Phase.ACTIVE])
def test_a_poisoned_drafter_is_out_within_300_places(
    phase: Phase, written: Sequence[RecordedText]
) -> None:
    scene = Scene("poisoned", GOOD, POOR, Phase.RETIRED, poisoned_in=phase)
    played = play(scene, written, 0, share=SHARE)
    assert played.is_right
    assert phase in played.reached_s
    assert 0 < played.places_of_poison <= MAX_PLACES_OF_POISON
