"""The drafter protocol: three methods.  A drafter may be wrong; it may never block or raise.

To add a drafter: write one file with a class that has these methods and an options dataclass,
and add one line to `cluster/draft/registry.py`; or name it `module:Class` in the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cluster.core import Commit, DraftTask, Observation, Proposal


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter may know of its surroundings.

    name: its name in the configuration, to be written into its proposals.
    max_nodes: bound of the tree it keeps per request.  max_requests: requests at the same time.
    vocab_size, tokenizer_hash: the target's; 0 and "" while unknown.
    """

    name: str
    max_nodes: int
    max_requests: int
    vocab_size: int = 0
    tokenizer_hash: str = ""


class Drafter(Protocol):
    """Grows token trees that continue committed text.

    Calls come from one thread, one at a time.  Requests are opened by their first commit.
    """

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        """Take note of committed tokens and re-root the trees; one observation per commit.

        A commit whose base_len exceeds what the drafter holds, or whose prefix_hash differs from
        its own, changes nothing; the observation's have_len says from where to send again.
        """
        ...

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """One bounded slice of growth over `tasks` (a few milliseconds at most).

        Returns only what improved since the last call: a request whose tree is complete, or that
        the drafter does not know, is absent.  An empty answer means there is nothing left to grow.
        """
        ...

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget these requests; unknown ones are no error."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """Optional for drafters whose slices take longer than it takes to grow a little."""

    def interrupt(self) -> None:
        """A commit has arrived: end the slice under way soon.  Called from any thread."""
        ...
