"""Records of the rounds: dataclasses that are made for every sequence in every round."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:
    from dataclasses import dataclass

    def record(**options):
        """A dataclass that is frozen to the type checker only.

        At run time, freezing more than doubles what making one costs.
        """
        return dataclass(**{**options, "frozen": False})
