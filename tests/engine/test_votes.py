"""Ranks fall back together or not at all; loading may take long, a collective may not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.engine.cpu import kernels
from cluster.records import frozen
from tests.support.engine.native import needs_native
from tests.support.engine.ranks import two_ranks
from tests.support.engine.vote_process import SCENARIOS


@frozen
class Session:
    """settled: what both ranks said of each scenario.  loaded, last_word: of the leader, while the
    other rank was alive and silent."""

    settled: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    loaded: str
    last_word: str
    has_ended: bool


@pytest.fixture(scope="module")
def session(llama_folder: Path) -> Iterator[Session]:
    """Two ranks that settle in every scenario, and then one is late."""
    scenarios = SCENARIOS if kernels.load() is not None else ()
    with two_ranks("vote_process", llama_folder, *scenarios) as processes:

        def said() -> list[str]:
            return [(each.stdout.readline() if each.stdout else "").strip() for each in processes]

        found = {name: [json.loads(line or "{}") for line in said()] for name in scenarios}
        settled = {name: (first, second) for name, (first, second) in found.items()}
        leader, follower = processes
        assert leader.stdout is not None
        loaded, last_word = (leader.stdout.readline().strip() for _ in range(2))
        yield Session(settled, loaded, last_word, follower.poll() is not None)


@needs_native
def test_all_ranks_fall_back_where_the_check_of_one_fails(session: Session):
    first, second = session.settled["one"]
    assert first["attention"] == second["attention"] == "sdpa"
    # Both have run both checks: a collective of one alone would have had no end.
    assert first["checks"] == second["checks"] == 2
    assert "another rank" in first["fallbacks"][0]
    assert "a layer is wrong" in second["fallbacks"][0]


@needs_native
def test_no_rank_falls_back_where_all_are_right(session: Session):
    for each in session.settled["right"]:
        assert each == {"attention": "native", "fallbacks": [], "checks": 1}


@needs_native
@pytest.mark.parametrize(("scenario", "checks"), [("chosen", 1), ("never", 2)])
def test_all_ranks_refuse_where_there_is_nothing_to_fall_back_to(
    scenario: str, checks: int, session: Session
):
    first, second = session.settled[scenario]
    assert "another rank" in first["error"] or scenario == "never"
    assert second["error"] == "a layer is wrong"
    assert first["checks"] == second["checks"] == checks


def test_a_rank_may_load_for_longer_than_a_collective_may_take(session: Session):
    assert session.loaded == "loaded"
    assert session.last_word == "worker_error"
    assert not session.has_ended
