"""What a round is said to have taken."""

from __future__ import annotations

import pytest

from cluster.coordinator.targets import TargetSeat
from cluster.messages import WorkerDescription
from cluster.rpc.memory import memory_pair


def test_a_rounds_own_way_is_charged_and_the_usual_one_where_it_is_not_known() -> None:
    description = WorkerDescription("t", "target", "t", vocab_size=8)
    seat = TargetSeat("t", description, memory_pair()[0], 1 << 20, 0.0)
    assert seat.record_step_time(0.020, 0.002, 0.003) == pytest.approx(0.025)
    with_drafts = seat.record_step_time(0.020, 0.004, 0.006)
    assert with_drafts == pytest.approx(0.030)
    beside_prefills = seat.record_step_time(0.020, 0.001)
    assert 0.021 + 0.003 < beside_prefills < 0.021 + 0.006
