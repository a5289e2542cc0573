"""EAGLE-3 and multi-token prediction: a head of one layer on the target's hidden rows, inside it.

After every step the head's keys of the new tokens are written beside the target's own
(`cluster.draft.head_cache`).  A round then grows a tree from the text's last token, best first by
the survival that the shared noise gives; for a draft the head's own output stands in for the hidden
row of the target, which has none yet.  The next round starts anew from the target's rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from cluster.core import DraftTask, Proposal
from cluster.draft.head_cache import Span, SpanAttention
from cluster.draft.head_drafter import Begun, Growth, HeadDrafter, HeadRequest
from cluster.draft.heads.head import Head
from cluster.draft.live_tree import ROOT
from cluster.draft.options import Eagle3Options

# Requests with a node each, to be expanded.
Rows = Sequence[tuple[HeadRequest, int]]


class Eagle3Drafter(HeadDrafter[Head]):
    """A slice of growth is one pass over all requests."""

    kind = "eagle3"
    _options: Eagle3Options

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`.  One pass expands the most likely leaves of all requests."""
        asked = self._asked(tasks)
        growing = [each for each in asked if each[0].tree is not None]
        rows = self._roots(self._begun(asked))
        for request, leaves in self._leaves(growing):
            assert request.tree is not None
            request.tree.assign_slots(leaves)
            rows += [(request, leaf) for leaf in leaves]
        self._run(rows)
        grown = {request for request, _ in rows}
        return [
            self._proposal(request, num_asked)
            for request, num_asked in asked
            if request in grown and request.tree is not None
        ]

    def _draft(self, begun: Sequence[Begun]) -> Sequence[Proposal]:
        self._run(self._roots(begun))
        return []

    def _roots(self, begun: Sequence[Begun]) -> list[tuple[HeadRequest, int]]:
        """Start a tree behind each text."""
        for request, _, context in begun:
            request.growth = Growth(request.begin(), Span(context.layers), context.hidden)
        return [(request, ROOT) for request, _, _ in begun]

    def _run(self, rows: Rows) -> None:
        """Run the head on nodes and give them children."""
        if rows:
            self._expand(rows, self._logits(rows))

    def _logits(self, rows: Rows) -> torch.Tensor:
        """The head's rows of these nodes, those of one request neighbours: their logits,
        float32[rows, draft_vocab]."""
        token_ids: list[int] = []
        hidden: list[torch.Tensor] = []
        positions: list[int] = []
        counts: Counter[Growth] = Counter()
        for request, node in rows:
            growth = request.growth
            assert growth is not None
            tree, is_root = growth.tree, node == ROOT
            parent = tree.slots[tree.parents[node]] + 1  # its place
            token_ids.append(int(request.text.token_ids[-1]) if is_root else tree.tokens[node])
            hidden.append(growth.first if is_root else growth.handed_on[parent])
            # The head's row of a token stands where the hidden row before it does.
            positions.append(request.root_len - 2 + tree.depths[node])
            counts[growth] += 1
        device = hidden[0].device
        found = self._head(
            torch.tensor(token_ids, device=device),
            torch.stack(hidden),
            torch.tensor(positions, device=device),
            SpanAttention([growth.part(count) for growth, count in counts.items()]),
        )
        handed_on = torch.split(self._head.handed_on(found), list(counts.values()))
        for growth, own_rows in zip(counts, handed_on, strict=True):
            growth.handed_on += own_rows.unbind()
        return self._head.logits(found).float()


class MtpDrafter(Eagle3Drafter):
    """The layer that the target's own checkpoint brings for it: it drafts as an EAGLE-3 head does,
    from the rows behind the target's final norm."""

    kind = "mtp"
