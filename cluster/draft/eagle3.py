"""EAGLE-3 and multi-token prediction: a head of one layer on the target's hidden rows, inside it.

After every step the head's keys of the new tokens are written beside the target's own
(`cluster.draft.head_cache`).  A round then grows a tree from the text's last token, best first by
the survival that the shared noise gives; for a draft the head's own output stands in for the hidden
row of the target, which has none yet.  The next round starts anew from the target's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cluster.core import DraftTask, Proposal
from cluster.draft.base import DrafterContext
from cluster.draft.candidates import rank_rows
from cluster.draft.head_attention import Part, Span, SpanAttention
from cluster.draft.head_cache import HeadCache, layers
from cluster.draft.head_drafter import NO_LIMIT, HeadDrafter, HeadRequest
from cluster.draft.head_options import Eagle3Options
from cluster.draft.heads import mtp
from cluster.draft.heads.checkpoint import read_config
from cluster.draft.heads.eagle3 import Eagle3Head, layer_of
from cluster.draft.heads.load import ReadyHead, made_ready, ready_head, target_shape
from cluster.draft.heads.mtp import MtpHead
from cluster.draft.inside import Host, StepWants, host_of
from cluster.draft.leaves import choose_leaves
from cluster.draft.live_tree import ROOT, LiveTree
from cluster.draft.tree_request import expand_nodes
from cluster.engine.types import LayerSpec
from cluster.models.made_for import MadeFor
from cluster.models.resolve import resolve, resolve_head


@dataclass(slots=True, eq=False)
class _Growth:
    """The head's rows of one request's round.

    span: rows of the text, then those of the places: the root is place 0, the node of slot i place
    i + 1.  first: [hidden], what the root takes.  handed_on: [hidden] by place, what its children
    take.  seen: the places that each one sees.
    """

    span: Span
    first: torch.Tensor
    handed_on: list[torch.Tensor] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)

    def part(self, places: Sequence[int]) -> Part:
        """Rows of a pass, those of the next places, each of which sees the text and its path."""
        num_held = self.span.num_held
        mask = torch.zeros(len(places), num_held + places[-1] + 1, dtype=torch.bool)
        mask[:, :num_held] = True
        for row, place in enumerate(places):
            mask[row, [num_held + each for each in self.seen[place]]] = True
        return Part(self.span, len(places), [mask.to(self.first.device)])


@dataclass(slots=True, eq=False)
class Eagle3Request(HeadRequest):
    """growth: of the tree's round; None where there is no tree."""

    growth: _Growth | None = None

    def drop_tree(self) -> None:
        self.tree = self.growth = None


class Eagle3Drafter(HeadDrafter[Eagle3Request, Eagle3Head | MtpHead]):
    """See `Drafter` and `StepReader`.  A slice of growth is one pass over all requests."""

    kind = "eagle3"
    _cache: HeadCache

    def __init__(self, context: DrafterContext, options: Eagle3Options) -> None:
        host = host_of(context.target, context.name, self.kind)
        super().__init__(context, self._ready(options, host), Eagle3Request, 1)
        self.wants = StepWants(self._head.spec.taps)
        self._cache = HeadCache(host, self._head, self._dtype, options.context)
        self._options = options
        self._warm_up(host.device)

    @torch.inference_mode()
    def _warm_up(self, device: torch.device) -> None:
        spec = self._head.spec
        layer, num_taps = spec.layer, len(spec.taps)
        taps = torch.zeros(1, num_taps * spec.target_hidden_size, dtype=self._dtype, device=device)
        nothing = taps.new_zeros(2, 0, layer.num_key_value_heads, layer.head_dim)
        request = self._request_of_nobody()
        request.tree, request.root_len = LiveTree(), 2
        span = Span([(nothing[0], nothing[1])])
        request.growth = _Growth(span, self._head.fuse(taps)[0])
        self._expand([(request, ROOT)])

    def _ready(self, options: Eagle3Options, host: Host) -> ReadyHead[Any]:
        return ready_head(Eagle3Head, options.model, host)

    @classmethod
    def kv_layers(cls, options: Eagle3Options, like: LayerSpec) -> Sequence[LayerSpec]:
        """See `StepReader`."""
        folder = resolve_head(options.model)
        layer = layer_of(folder, read_config(folder))
        return layers(layer, like)

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`.  One pass expands the most likely leaves of all requests."""
        asked = self._asked(tasks)
        rows: list[tuple[Eagle3Request, int]] = []
        growing: list[tuple[Eagle3Request, int, float]] = []
        for request, num_asked in asked:
            if request.tree is None:
                if self._begin(request):
                    rows.append((request, ROOT))
            elif request.tree.num_slots < num_asked:
                growing.append((request, num_asked, self._least(request.tree, num_asked)))
        num_rows = min(self._options.max_rows, self._options.width * len(growing))
        for request, leaves in choose_leaves(growing, num_rows):
            assert request.tree is not None
            request.tree.assign_slots(leaves)
            rows += [(request, leaf) for leaf in leaves]
        if not rows:
            return []
        self._expand(rows)
        grown = {request for request, _ in rows}
        return [
            self._proposal(request, num_asked)
            for request, num_asked in asked
            if request in grown and request.tree is not None
        ]

    def _begin(self, request: Eagle3Request) -> bool:
        """Start a tree behind the text, where the target's rows of it are there."""
        text = request.text.token_ids
        context = self._cache.read(request.request_id, text) if request.can_begin else None
        if context is None:
            return False
        request.tree, request.root_len = LiveTree(), len(text)
        request.growth = _Growth(Span(context.layers), context.hidden)
        return True

    def _expand(self, rows: Sequence[tuple[Eagle3Request, int]]) -> None:
        """Run the head on nodes and give them children."""
        logits = self._run(rows)
        rows, logits = self._sound(rows, logits)
        if not rows:
            return
        options = self._options
        ranked = rank_rows(
            logits,
            [request.row_context(node) for request, node in rows],
            options.num_candidates,
            self._vocabulary,
        )
        fits = [self._fits_of(request)[0] for request, _ in rows]
        expand_nodes(rows, ranked, fits, options.num_children, NO_LIMIT)

    def _sound(
        self, rows: Sequence[tuple[Eagle3Request, int]], logits: torch.Tensor
    ) -> tuple[Sequence[tuple[Eagle3Request, int]], torch.Tensor]:
        """Without the requests that have a row of NaN, whose round is over."""
        is_finite = torch.isfinite(logits.sum(dim=1)).tolist()
        if all(is_finite):
            return rows, logits
        for (request, _), is_sound in zip(rows, is_finite, strict=True):
            if not is_sound:
                request.fail()
        kept = [index for index, (request, _) in enumerate(rows) if request.tree is not None]
        return [rows[index] for index in kept], logits[kept]

    def _run(self, rows: Sequence[tuple[Eagle3Request, int]]) -> torch.Tensor:
        """The head's rows of these nodes, those of one request neighbours: their logits,
        float32[rows, draft_vocab]."""
        token_ids: list[int] = []
        hidden: list[torch.Tensor] = []
        positions: list[int] = []
        places: dict[int, tuple[_Growth, list[int]]] = {}
        for request, node in rows:
            tree, growth = request.tree, request.growth
            assert tree is not None
            assert growth is not None
            is_root = node == ROOT
            place = 0 if is_root else tree.slots[node] + 1
            parent = 0 if is_root else tree.slots[tree.parents[node]] + 1
            token_ids.append(int(request.text.token_ids[-1]) if is_root else tree.tokens[node])
            hidden.append(growth.first if is_root else growth.handed_on[parent])
            # The head's row of a token stands where the hidden row before it does.
            positions.append(request.root_len - 2 + tree.depths[node])
            growth.seen.append([place] if is_root else [*growth.seen[parent], place])
            places.setdefault(id(growth), (growth, []))[1].append(place)
        device, of_texts = hidden[0].device, list(places.values())
        found = self._head(
            torch.tensor(token_ids, device=device), torch.stack(hidden),
            torch.tensor(positions, device=device),
            SpanAttention([growth.part(own) for growth, own in of_texts]),
        )  # fmt: skip
        handed_on = torch.split(self._head.handed_on(found), [len(own) for _, own in of_texts])
        for (growth, _), own_rows in zip(of_texts, handed_on, strict=True):
            growth.handed_on += own_rows.unbind()
        return self._head.logits(found).float()

    def _proposal(self, request: Eagle3Request, num_asked: int) -> Proposal:
        tree = request.tree
        assert tree is not None
        least = self._least(tree, num_asked)
        is_growing = tree.num_slots < num_asked and tree.best_leaf_survival() >= least
        return request.proposal(
            num_asked, self._options.min_survival, self._name, is_growing=is_growing
        )

    def _least(self, tree: LiveTree, num_asked: int) -> float:
        """The survival of a leaf that is worth a row of the head."""
        return max(self._options.min_survival, tree.least_worth(num_asked))


class MtpDrafter(Eagle3Drafter):
    """The layer that the target's own checkpoint brings for it: it drafts as an EAGLE-3 head does,
    from the rows behind the target's final norm."""

    kind = "mtp"

    def _ready(self, options: Eagle3Options, host: Host) -> ReadyHead[Any]:
        head = mtp.load(resolve(options.model), target_shape(host), host.weight)
        return made_ready(head, host, MadeFor())  # it lies in the target's own folder

    @classmethod
    def kv_layers(cls, options: Eagle3Options, like: LayerSpec) -> Sequence[LayerSpec]:
        """See `StepReader`."""
        layer = mtp.layer_of(resolve(options.model))
        return layers(layer, like)
