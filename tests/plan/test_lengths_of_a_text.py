"""Draft lengths as pure functions of a text's history, and the texts that a rule is for."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.draft_length import DraftLengthConfig, DraftLengthOverride
from cluster.plan.in_flight import next_len

MOST = 16


def lens(history: str, **settings: Any) -> list[int]:
    """The draft lengths of a text's steps, from the first on.

    history: of each step with drafts accepted/depth.
    """
    config = DraftLengthConfig(**settings)
    found = [next_len(config, config.num_tokens, (), MOST)]
    fates: list[tuple[int, int]] = []
    for step in history.split():
        accepted, _, depth = step.partition("/")
        fates = [*fates, (int(accepted), int(depth))][-config.num_steps :]
        found.append(next_len(config, found[-1], fates, MOST))
    return found


HEURISTIC: Any = {"kind": "heuristic"}
WINDOW: Any = {"kind": "window"}


@pytest.mark.parametrize(
    ("settings", "history", "expected"),
    [
        (HEURISTIC, "5/5 7/7 9/9", [5, 7, 9, 11]),
        (HEURISTIC, "4/5 0/4 0/3 0/2 0/1", [5, 4, 3, 2, 1, 1]),
        (HEURISTIC, "3/3 2/3 3/3", [5, 7, 6, 8]),
        (HEURISTIC, "1/1 " * 7, [5, 7, 9, 11, 13, 15, 16, 16]),
        ({**HEURISTIC, "num_tokens": 0}, "", [1]),
        ({**HEURISTIC, "num_tokens": 99}, "0/9", [16, 15]),
        ({**HEURISTIC, "min_tokens": 4, "max_tokens": 6}, "1/1 0/1 0/1 0/1", [5, 6, 5, 4, 4]),
        (WINDOW, "5/5 6/6 7/7", [5, 6, 7, 8]),
        (WINDOW, "0/5 0/4 0/3", [5, 4, 3, 3]),
        (WINDOW, "3/4 3/4 3/4", [5, 5, 5, 5]),
        (WINDOW, "9/9 " * 9, [5, 6, 7, 8, 9, 10, 11, 12, 12, 12]),
        # One miss in ten steps of one token leaves 0.9, which is not above it.
        (
            {**WINDOW, "num_tokens": 3},
            "1/1 1/1 0/1 1/1 1/1 1/1 1/1 1/1 1/1 1/1 1/1 1/1 1/1",
            [3, 4, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 6],
        ),
        ({**WINDOW, "num_steps": 1}, "0/4 4/4 2/4 3/4", [5, 4, 5, 4, 4]),
        ({**WINDOW, "raise_above": 0.4, "lower_below": 0.2}, "2/4 1/4 0/4", [5, 6, 6, 6]),
        ({**WINDOW, "min_tokens": 5, "max_tokens": 5}, "4/4 0/9", [5, 5, 5]),
    ],
)
def test_the_length_follows_the_history(
    settings: dict[str, Any], history: str, expected: list[int]
) -> None:
    assert lens(history, **settings) == expected


@pytest.mark.parametrize(
    ("settings", "former", "fates", "most", "expected"),
    [(HEURISTIC, 5, [], 2, 2), (HEURISTIC, 2, [(2, 2)], 3, 3), (WINDOW, 5, [], 0, 0)],
)
def test_no_length_is_above_what_the_text_may_have(
    settings: dict[str, Any], former: int, fates: list[tuple[int, int]], most: int, expected: int
) -> None:
    assert next_len(DraftLengthConfig(**settings), former, fates, most) == expected


def test_all_conditions_of_a_rule_must_hold() -> None:
    rule = DraftLengthOverride(load_from=8, latency_class="throughput", task="code")
    assert rule.is_for("throughput", "code", 8)
    assert not rule.is_for("throughput", "code", 7)
    assert not rule.is_for("interactive", "code", 8)
    assert not rule.is_for("throughput", "default", 8)
    assert DraftLengthOverride().is_for("", "default", 1)
