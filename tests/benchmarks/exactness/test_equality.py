"""What counts as equal text, which prompts are asked, and when the check fails."""

from __future__ import annotations

from typing import Any

from benchmarks.exactness.equality import problems


def row(equal: int, length: float | None) -> dict[str, Any]:
    return {"equal": equal, "of": 4, "mean acceptance length": length}


def test_a_text_that_differs_and_a_run_without_drafts_are_problems() -> None:
    assert problems({"off": row(4, None), "on": row(4, 2.0)}) == []
    assert problems({"off": row(4, None), "on": row(3, 2.0)}) == ["on: 1 of 4 texts differ"]
    assert problems({"on": row(4, None)}) == ["no draft was verified, so nothing was tested"]
