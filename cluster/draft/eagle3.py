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
from collections.abc import Sequence

import numpy as np
import torch

from cluster.core import DraftTask, Proposal
from cluster.draft.base import DrafterContext
from cluster.draft.candidates import RowContext, rank_best
from cluster.draft.head_drafter import Begun, Growth, HeadDrafter, HeadRequest
from cluster.draft.head_passes import Network, RoundText
from cluster.draft.head_rounds import DeviceRounds, Expanded
from cluster.draft.head_spans import Span, SpanAttention
from cluster.draft.heads.head import Head
from cluster.draft.inside import IndexArray, host_of
from cluster.draft.live_tree import ROOT
from cluster.draft.options import Eagle3Options
from cluster.engine.reminder import in_a_line
from cluster.records import record

log = logging.getLogger(__name__)

# Requests with a node each, to be expanded.
Rows = Sequence[tuple[HeadRequest, int]]


@record
class _Round:
    """A request whose tree grows on the device.

    nodes: of its places so far, None where the host's tree has none.  depths: theirs."""

    request: HeadRequest
    num_asked: int
    nodes: list[int | None]
    depths: list[int]


class Eagle3Drafter(HeadDrafter[Head]):
    """A slice of growth is one pass over all requests; where there are graphs, a whole round."""

    kind = "eagle3"
    _options: Eagle3Options

    def __init__(self, context: DrafterContext, options: Eagle3Options) -> None:
        super().__init__(context, options)
        self._rounds: DeviceRounds | None = None
        host = host_of(context.target, context.name, self.kind)
        if host.capture is not None:
            kv, hidden = host.caches
            ids = self._head.token_map
            if self._vocabulary is not None:
                ids = torch.from_numpy(self._vocabulary.target_ids)
            ids = ids.to(host.device, torch.int64)
            network = Network(self._head, kv, hidden, self._dtype, ids, options)
            self._rounds = DeviceRounds(network, self._max_nodes, host.capture)

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`.  One pass expands the most likely leaves of all requests."""
        asked = self._asked(tasks)
        proposals = self._by_rounds(asked)
        growing = [each for each in asked if each[0].growth is not None]
        rows = self._roots(self._begun(asked))
        for request, leaves in self._leaves(growing):
            request.live.assign_slots(leaves)
            rows += [(request, leaf) for leaf in leaves]
        self._run(rows)
        grown = {request for request, _ in rows}
        return proposals + [
            self._proposal(request, num_asked)
            for request, num_asked in asked
            if request in grown and request.tree is not None
        ]

    def _by_rounds(self, asked: Sequence[tuple[HeadRequest, int]]) -> list[Proposal]:
        """Whole trees behind all texts that have none, if graphs can grow them."""
        if self._rounds is None:
            return []
        rounds, texts = list[_Round](), list[RoundText]()
        for request, num_asked in asked:
            found = None
            if request.tree is None and request.can_use_drafts:
                found = self._cache.find(request.request_id, request.text.token_ids)
            if found is not None:
                rounds.append(_Round(request, num_asked, [], []))
                texts.append(self._round_text(request, num_asked, *found))
        if not texts or not self._rounds.takes(texts):
            return []
        try:
            expanded = self._rounds.begin(texts)
        except Exception as error:  # noqa: BLE001 - a head's own code may do what no graph can
            log.warning("trees of %s grow without CUDA graphs: %s", self._name, in_a_line(error))
            self._rounds = None
            return []
        for each in rounds:
            each.request.begin()
        while self._adopt(rounds, expanded) and any(
            self._is_growing(each.request, each.num_asked) for each in rounds
        ):
            expanded = self._rounds.go_on()
        return [self._proposal(each.request, each.num_asked) for each in rounds]

    def _round_text(
        self, request: HeadRequest, num_asked: int, positions: IndexArray, slots: IndexArray
    ) -> RoundText:
        fit = self._fits_of(request)[0]
        return RoundText(
            token=int(request.text.token_ids[-1]),
            root_len=len(request.text),
            position=request.next_position,
            num_asked=num_asked,
            params=request.params,
            tau=fit.tau,
            coverage=fit.coverage,
            slots=slots[positions],
            last_slot=int(slots[-1]),
        )

    def _adopt(self, rounds: Sequence[_Round], expanded: Expanded) -> bool:
        """Expand the trees as the device did; False if it expanded no further node."""
        rows: list[tuple[int, int]] = []
        contexts: list[RowContext] = []
        for text, each in enumerate(rounds):
            for place in range(len(each.nodes), int((expanded.tokens[text] >= 0).sum())):
                above = each.depths[int(expanded.parents[text, place])] if place else -1
                each.depths.append(above + 1)
                position = each.request.position_after(ROOT) + above + 1
                rows.append((text, place))
                contexts.append(RowContext(each.request.params, position))

        def node_of(row: int) -> int | None:
            text, place = rows[row]
            each, tree = rounds[text], rounds[text].request.live
            node: int | None = ROOT
            if place:
                parent = each.nodes[int(expanded.parents[text, place])]
                child = -1 if parent is None else tree.child(parent, expanded.tokens[text, place])
                node = None if child < 0 else child
                if node is not None:
                    tree.take((node,))
                    tree.assign_slots((node,))
            each.nodes.append(node)
            return node

        if rows:
            where = tuple(np.array(rows).T)
            ranked = rank_best(
                expanded.logits[where], expanded.columns[where], contexts, self._vocabulary
            )
            self._give_children([rounds[text].request for text, _ in rows], ranked, node_of)
        return bool(rows)

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
