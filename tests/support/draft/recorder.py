"""A drafter that drafts nothing and remembers what it was told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from cluster.core import Commit, DraftTask, Observation, Proposal
from cluster.draft.base import DrafterContext
from cluster.records import frozen


@frozen
class NoOptions:
    """None."""


class Recorder:
    """All of one process share `commits`."""

    Options = NoOptions
    commits: ClassVar[list[Commit]] = []

    def __init__(self, context: DrafterContext, options: NoOptions) -> None:
        self.commits.clear()

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        self.commits.extend(commits)
        return [
            Observation(each.request_id, each.generation, each.base_len + len(each.token_ids))
            for each in commits
        ]

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        return ()

    def release(self, request_ids: Sequence[str]) -> None:
        """It keeps nothing of them."""
