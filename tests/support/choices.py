"""What every night tests whole, and each day a part of: a night has the profile `nightly`."""

import os
from collections.abc import Callable, Collection
from itertools import combinations, product
from typing import Any, NoReturn, TypeVar

import pytest
from hypothesis import settings

Test = TypeVar("Test", bound=Callable[..., None])
T = TypeVar("T")
IS_NIGHT = settings.get_current_profile_name() == "nightly"


by_night = pytest.mark.skipif(not IS_NIGHT, reason="asked by night")


def by_day(some: T, every: T) -> T:
    """What a test takes: `some` by day, `every` by night."""
    return every if IS_NIGHT else some


def absent(what: str) -> NoReturn:
    """Skip the test for want of `what`; where everything must be tested it fails."""
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


def pairwise(**choices: Collection[Any]) -> Callable[[Test], Test]:
    """Parametrises by so few combinations that each value of a choice meets each of every other.

    Every night by all of them."""
    values = [list(each) for each in choices.values()]
    left = list(product(*(range(len(each)) for each in values)))
    chosen = left if IS_NIGHT else []
    met: set[tuple[tuple[int, int], ...]] = set()
    while not chosen or len(chosen) < len(left):
        best = max(left, key=lambda each: len(_pairs(each) - met))
        if _pairs(best) <= met:
            break
        met |= _pairs(best)
        chosen.append(best)
    cases = [[own[at] for own, at in zip(values, each, strict=True)] for each in chosen]
    return pytest.mark.parametrize(list(choices), cases)


def _pairs(indices: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(indices), 2))
