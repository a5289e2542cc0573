"""How records are declared: those that never change, and those that are made in every round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(kind: type[T]) -> type[T]:
    """A dataclass that nothing changes, and that has its fields alone."""
    return dataclass(frozen=True, slots=True)(kind)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def record(kind: type[T]) -> type[T]:
    """One that is made for every sequence in every round: equal to itself alone, and frozen to the
    type checker only.

    At run time, freezing more than doubles what making one costs.
    """
    return dataclass(slots=True, eq=False)(kind)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def equal_record(kind: type[T]) -> type[T]:
    """A `record` that is equal to others with the same fields."""
    return dataclass(slots=True)(kind)
