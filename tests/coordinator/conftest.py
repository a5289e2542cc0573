"""The budgets under which the text must be the target's."""

import pytest

from tests.support.choices import by_day
from tests.support.coordinator import house


@pytest.fixture(params=by_day(["adaptive"], ["fixed", "adaptive"]))
def budget(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adaptive one, the default, learns from trees that the fixed one never reads; most other
    tests have the fixed one."""
    monkeypatch.setattr(house, "BUDGET", request.param)


@pytest.fixture(autouse=True)
def _every_line_is_whole(whole_lines: None) -> None: ...
