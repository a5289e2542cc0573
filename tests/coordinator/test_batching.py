"""Homogeneous batches, within the bound of the wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.coordinator.batching import choose_batch, purity
from cluster.coordinator.session import Session
from tests.support.coordinator.house import GREEDY, SEEDED, request


def ready(name: str, task: str, since: float, *, sampled: bool = False) -> Session:
    asked = request(params=replace(SEEDED if sampled else GREEDY), task=task, id=name)
    session = Session(name, asked, lambda event: None, int(name[1:]), since)
    session.ready_since = since
    return session


def names(batch: list[Session]) -> list[str]:
    return sorted(session.id for session in batch)


def test_a_group_alone_never_waits() -> None:
    group = [ready(f"s{i}", "code", 10.0) for i in range(3)]
    assert names(choose_batch(group, 10.0, 0.002, 0.5, 64)) == ["s0", "s1", "s2"]


@pytest.mark.parametrize("sampled", [False, True])
def test_groups_stay_apart_while_the_step_fits_the_wait(sampled: bool) -> None:
    """They differ in task, or in task and law."""
    group = [ready("s0", "code", 9.9995), ready("s1", "prose", 10.0, sampled=sampled)]
    assert names(choose_batch(group, 10.0, 0.002, 0.001, 64)) == ["s0"]


def test_greedy_and_sampled_of_one_task_are_two_groups() -> None:
    group = [ready("s0", "code", 9.9995), ready("s1", "code", 10.0, sampled=True)]
    assert names(choose_batch(group, 10.0, 0.002, 0.001, 64)) == ["s0"]


def test_groups_mix_when_sitting_out_would_break_the_bound() -> None:
    group = [ready("s0", "code", 9.9995), ready("s1", "prose", 10.0)]
    assert names(choose_batch(group, 10.0, 0.002, 0.003, 64)) == ["s0", "s1"]
    waited = [ready("s0", "code", 9.99), ready("s1", "prose", 9.9985)]
    assert names(choose_batch(waited, 10.0, 0.002, 0.001, 64)) == ["s0", "s1"]


@pytest.mark.parametrize("step_time_s", [0.0002, 0.0007, 0.0015, 0.0021, 0.01])
def test_no_sequence_is_ready_for_longer_than_the_bound_before_its_step(step_time_s: float) -> None:
    """Three groups take turns on a virtual clock; every wait is measured."""
    sessions = [ready(f"s{i}", ("code", "prose", "chat")[i % 3], 0.0) for i in range(9)]
    waiting, now, longest = list(sessions), 0.0, 0.0
    for _ in range(200):
        batch = choose_batch(waiting, now, 0.002, step_time_s, 64)
        assert batch
        longest = max(longest, *(now - session.ready_since for session in batch))
        now += step_time_s
        waiting = [session for session in waiting if session not in batch]
        for session in batch:
            session.ready_since = now
        waiting.extend(batch)
    assert longest <= 0.002 + 1e-9


def test_no_wait_at_all_means_always_mixed() -> None:
    group = [ready("s0", "code", 10.0), ready("s1", "prose", 10.0)]
    assert len(choose_batch(group, 10.0, 0.0, 0.001, 64)) == 2


def test_a_full_batch_takes_the_longest_waiting() -> None:
    group = [ready(f"s{i}", "code", 10.0 - i) for i in range(5)]
    assert names(choose_batch(group, 10.0, 0.002, 0.001, 2)) == ["s3", "s4"]


def test_purity_is_the_share_of_the_most_frequent_task() -> None:
    tasks = ("code", "code", "prose", "code")
    assert purity([ready(f"s{i}", task, 0.0) for i, task in enumerate(tasks)]) == 0.75
