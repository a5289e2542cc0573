"""What the log and the client learn of a bug of ours."""

from __future__ import annotations

import logging

import pytest

from deployments.ingress.body import hidden

SECRET = "what the prompt said"


def endless(depth: int) -> int:
    return endless(depth + 1) + 1 if depth < 10**6 else 0


def test_an_endless_recursion_writes_some_lines_and_no_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(RecursionError) as caught:
        endless(0)
    caught.value.args = (SECRET,)
    error = hidden(caught.value, "mine-7")
    assert "unexpected RecursionError id=mine-7" in caplog.text
    assert "in endless" in caplog.text
    assert len(caplog.text.splitlines()) < 60
    assert SECRET not in caplog.text + error.message
