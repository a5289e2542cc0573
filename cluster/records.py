"""How records are declared: those that never change, and those that are made in every round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, dataclass_transform

__all__ = ["frozen", "record"]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(kind: type[T]) -> type[T]:
    """A dataclass that nothing changes, and that has its fields alone."""
    return dataclass(frozen=True, slots=True)(kind)


if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(**options):
        """A dataclass that is frozen to the type checker only.

        At run time, freezing more than doubles what making one costs.
        """
        return dataclass(**{**options, "frozen": False})
