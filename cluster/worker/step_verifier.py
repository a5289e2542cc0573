"""The part of a verifier that the step loop uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from cluster.core import VerifyItem
from cluster.draft.inside import StepRows
from cluster.messages import Refusal
from cluster.worker.item_check import CacheMiss
from cluster.worker.verifier import Stepped


class StepVerifier(Protocol):
    """The methods of `cluster.worker.verifier.Verifier` that the step loop calls."""

    @property
    def has_pending(self) -> bool: ...
    @property
    def pages(self) -> tuple[int, int]: ...
    @property
    def last_rows(self) -> Sequence[StepRows]: ...
    def submit(self, items: Sequence[VerifyItem]) -> Sequence[Refusal | CacheMiss]: ...
    def step(self) -> Stepped: ...
    def release(self, request_ids: Iterable[str]) -> None: ...
