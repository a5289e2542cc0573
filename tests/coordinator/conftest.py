"""The budgets under which the text must be the target's."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["fixed", "adaptive"])
def budget(request: pytest.FixtureRequest) -> str:
    """The adaptive one, the default, learns from trees that the fixed one never reads."""
    name: str = request.param
    return name
