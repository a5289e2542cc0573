"""EAGLE-3 and multi-token prediction: a head of one layer on the target's hidden rows, inside it.

After every step the head's keys of the new tokens are written beside the target's own
(`cluster.draft.head_cache`).  A round then grows a tree from the text's last token, best first by
the survival that the shared noise gives; for a draft the head's own output stands in for the hidden
row of the target, which has none yet.  The next round starts anew from the target's rows.

Where there are graphs, whole rounds run on the device (`cluster.draft.head_rounds`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from cluster.core import Proposal
from cluster.draft.base import DrafterContext, DraftTask
from cluster.draft.candidates import Ranking
from cluster.draft.head_cache import SpanAttention
from cluster.draft.head_drafter import HeadDrafter, HeadRequest
from cluster.draft.head_rounds import DeviceRounds, Expanded, RoundText
from cluster.draft.heads.head import Head
from cluster.draft.live_tree import Node
from cluster.draft.options import Eagle3Options
from cluster.engine.reminder import in_a_line

log = logging.getLogger(__name__)

# Requests with a node each, to be expanded.
Rows = Sequence[tuple[HeadRequest, Node]]


class Eagle3Drafter(HeadDrafter[Head]):
    """A slice of growth is one pass over all requests; where there are graphs, a whole round."""

    kind = "eagle3"
    _options: Eagle3Options

    def __init__(self, context: DrafterContext, options: Eagle3Options) -> None:
        super().__init__(context, options)
        self._rounds: DeviceRounds | None = None
        host = self._host
        if host.capture is not None:
            self._rounds = DeviceRounds(
                self._head, host.caches, self._dtype, options, self._max_nodes, host.capture
            )

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`.  One pass expands the most likely leaves of all requests."""
        asked = self._asked(tasks)
        proposals = self._by_rounds(asked)
        growing = [each for each in asked if each[0].span is not None]
        begun = self._begun(asked, self._cache.read)
        for request, _, context in begun:
            request.begin().root.handed_on = context.hidden
            request.span = context.span
        rows = [(request, request.live.root) for request, _, _ in begun]
        for request, leaves in self._leaves(growing):
            request.live.assign_slots(leaves)
            rows += [(request, leaf) for leaf in leaves]
        if rows:
            self._expand(rows, self._logits(rows))
        grown = {request for request, _ in rows}
        return proposals + [
            self._proposal(request, num_asked) for request, num_asked in asked if request in grown
        ]

    def _by_rounds(self, asked: Sequence[tuple[HeadRequest, int]]) -> list[Proposal]:
        """Whole trees behind all texts that have none, if graphs can grow them."""
        if self._rounds is None:
            return []
        texts = [
            RoundText(request, num_asked, self._fits_of(request)[0], *found)
            for request, num_asked, found in self._begun(asked, self._cache.find)
        ]
        if not texts or not self._rounds.takes(texts):
            return []
        try:
            expanded = self._rounds.begin(texts)
        except Exception as error:  # noqa: BLE001 - a head's own code may do what no graph can
            log.warning("trees of %s grow without CUDA graphs: %s", self._name, in_a_line(error))
            self._rounds = None
            return []
        for each in texts:
            each.request.begin()
        requests = [each.request for each in texts]
        while self._adopt(requests, expanded) and any(
            self._is_growing(each.request, each.num_asked) for each in texts
        ):
            expanded = self._rounds.go_on()
        return [self._proposal(each.request, each.num_asked) for each in texts]

    def _adopt(self, requests: Sequence[HeadRequest], expanded: Expanded) -> bool:
        """Expand the trees as the device did; False if it expanded no further node."""
        rows: list[tuple[int, int]] = []
        for text, request in enumerate(requests):
            tree, num_places = request.live, int((expanded.tokens[text] >= 0).sum())
            first = 0 if tree.root.ranking is None else len(tree.expanded) + 1
            rows += [(text, place) for place in range(first, num_places)]

        def nodes() -> Iterator[Node]:
            for text, place in rows:
                tree, above = requests[text].live, int(expanded.parents[text, place])
                node = tree.root
                if place:
                    parent = tree.expanded[above - 1] if above else tree.root
                    node = parent.children[int(expanded.tokens[text, place])]
                    tree.take(node)
                yield node

        if rows:
            where = tuple(np.array(rows).T)
            ranked = Ranking(expanded.token_ids[where], expanded.scores[where])
            self._give_children([requests[text] for text, _ in rows], nodes(), ranked)
        return bool(rows)

    def _logits(self, rows: Rows) -> torch.Tensor:
        """The head's rows of these nodes, those of one request neighbours: their logits,
        float32[rows, draft_vocab]."""
        nodes = [node for _, node in rows]
        hidden = torch.stack([node.parent.handed_on for node in nodes])
        # The head's row of a token stands where the hidden row before it does.
        positions = [request.root_len - 2 + node.depth for request, node in rows]
        counts = Counter(request for request, _ in rows)
        found = self._head(
            torch.tensor([node.token for node in nodes], device=hidden.device),
            hidden,
            torch.tensor(positions, device=hidden.device),
            SpanAttention([request.part(count) for request, count in counts.items()]),
        )
        for node, row in zip(nodes, self._head.handed_on(found).unbind(), strict=True):
            node.handed_on = row
        return self._head.logits(found).float()


class MtpDrafter(Eagle3Drafter):
    """The layer that the target's own checkpoint brings for it: it drafts as an EAGLE-3 head does,
    from the rows behind the target's final norm."""

    kind = "mtp"
