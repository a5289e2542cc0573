"""Everything that a drafter of your own needs; docs/own-drafter.md shows one.

`TextDrafter` keeps the texts and answers the coordinator, so that its author writes one method.
A drafter that wants more, such as trees that grow over several calls, implements `Drafter` itself
with the same parts: `RequestTable` for the rules about commits, `TokenLog` and `prefix_hash` for
the hashes of prefixes, `reroot` for what is left of a tree after a commit, `prune` for its best
nodes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from cluster.core import (
    Commit,
    FloatArray,
    Observation,
    Proposal,
    SamplingParams,
    TokenArray,
    TokenTree,
    token_array,
)
from cluster.draft.base import Drafter, DrafterContext, DraftTask, Interruptible
from cluster.draft.committed_text import (
    DraftedRequest,
    RequestState,
    RequestTable,
    WholeTreeDrafter,
    common_len,
)
from cluster.records import record
from cluster.spec.token_log import TokenLog, prefix_hash
from cluster.spec.tree import RerootResult, prune, reroot

__all__ = [
    "Commit",
    "Draft",
    "DraftTask",
    "Drafter",
    "DrafterContext",
    "FloatArray",
    "Interruptible",
    "Observation",
    "Proposal",
    "RequestState",
    "RequestTable",
    "RerootResult",
    "SamplingParams",
    "TextDrafter",
    "TokenArray",
    "TokenLog",
    "TokenTree",
    "common_len",
    "prefix_hash",
    "prune",
    "reroot",
    "token_array",
]


@record
class Draft:
    """A tree that continues a text.

    survival: float32[n], the probability that the text goes through each node.  It must not
    increase along a path; the target verifies the nodes with the greatest ones.
    """

    tree: TokenTree
    survival: FloatArray


class TextDrafter(WholeTreeDrafter[DraftedRequest]):
    """A drafter that drafts once after every commit.

    Subclasses write `draft`.  options: an instance of the class' `Options`.
    """

    def __init__(self, context: DrafterContext, options: Any = None) -> None:
        super().__init__(context, DraftedRequest.opened_by)
        self.context = context
        self.options = options

    @abstractmethod
    def draft(self, request: RequestState, max_nodes: int) -> Draft | None:
        """The tree that continues `request.text`, None for no tree.

        It has at most `max_nodes` nodes.  Takes a few milliseconds at most: while it runs, no
        other request is served by this replica.
        """

    def _drafts(
        self, asked: Sequence[tuple[DraftedRequest, int]]
    ) -> Iterator[tuple[DraftedRequest, TokenTree, FloatArray]]:
        for request, max_nodes in asked:
            if (draft := self.draft(request, max_nodes)) is not None:
                yield request, draft.tree, draft.survival
