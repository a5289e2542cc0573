"""Drafters with a draft head on the target's hidden rows: their base, and those of one pass.

Their trees are grown from the target's rows behind the text, so that each ends with a commit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import torch

from cluster.core import Proposal, TokenArray
from cluster.draft.base import DrafterContext, DraftTask
from cluster.draft.candidates import conditionals
from cluster.draft.head_cache import Span, TextCache, TextContext, TextRows, block_rows
from cluster.draft.heads.block import BlockHead
from cluster.draft.heads.eagle3 import Eagle3Head
from cluster.draft.heads.load import layers_of, ready_head
from cluster.draft.heads.medusa import MedusaHead
from cluster.draft.inside import StepRows, StepWants, host_of
from cluster.draft.tree_drafter import TreeDrafter, TreeRequest
from cluster.engine.loading.model_config import cached_layers
from cluster.engine.types import LayerSpec
from cluster.spec.tree import ancestor_mask

Head = TypeVar("Head", bound=torch.nn.Module)


@dataclass(slots=True, eq=False)
class HeadRequest(TreeRequest):
    """span: of a round that takes several passes, the keys and values of the text, of the tree's
    root and of its nodes by slot; None where there is no such round."""

    span: Span | None = None

    def part(self, num_rows: int) -> TextRows:
        """Rows of a pass, those of the last places, each of which sees the text and its path."""
        assert self.span is not None
        seen = ancestor_mask(np.append(-1, self.live.engine_tree().parents + 1))[-num_rows:]
        held = np.ones((num_rows, self.span.num_held), np.bool_)
        mask = torch.from_numpy(np.concatenate((held, seen), axis=1))
        return TextRows(self.span, num_rows, [mask.to(self.live.root.handed_on.device)])


# A request without a tree, how many nodes at most it is asked for, and what they begin from.
Begun = tuple[HeadRequest, int, Any]


class HeadDrafter(TreeDrafter[HeadRequest], Generic[Head]):
    """See `Drafter` and `StepReader`.  Keeps the requests' texts, and learns from each commit how
    sure the head is."""

    kind: ClassVar[str]

    def __init__(self, context: DrafterContext, options: Any) -> None:
        super().__init__(context, HeadRequest.opened_by)
        self._host = host = host_of(context, self.kind)
        head, self._vocabulary, self._dtype, self.made_for = ready_head(
            self.kind, options.model, host
        )
        self._head: Head = head
        self._options = options
        self.wants = StepWants(head.spec.taps)
        self._cache = self._new_cache()

    @classmethod
    def kv_layers(cls, options: Any, like: LayerSpec) -> Sequence[LayerSpec]:
        """See `StepReader`: its keys and values, latents being both; where rows take those before
        them, the fused hidden rows, one half as key, one as value."""
        layers = layers_of(cls.kind, options.model)
        shapes = [
            (each.num_kv_heads, each.head_dim * (1 + each.is_latent))
            for each in cached_layers(layers, like.dtype)
        ]
        if cls.kind != "block":
            shapes.append((1, (layers.hidden_size + 1) // 2))
        return [LayerSpec(heads, dim, like.dtype, like.device) for heads, dim in shapes]

    def _new_cache(self) -> Any:
        """What is kept of the texts, as `TextCache` does it."""
        return TextCache(self._host, cast("Any", self._head), self._dtype, self._options.context)

    def _draft(
        self, requests: Sequence[HeadRequest], sizes: Sequence[int], given: Sequence[Any]
    ) -> Sequence[Proposal]:
        """Whole trees of at most so many nodes, of one pass; see `_begun`."""
        raise NotImplementedError

    @torch.inference_mode()
    def read(self, rows: Sequence[StepRows]) -> None:
        """See `StepReader`."""
        self._cache.write(rows)

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`."""
        begun = self._begun(self._asked(tasks), self._cache.read)
        return self._draft(*zip(*begun, strict=True)) if begun else []

    def _begun(
        self, asked: Sequence[tuple[HeadRequest, int]], read: Callable[[str, TokenArray], Any]
    ) -> list[Begun]:
        """Those behind whose text a tree can begin, with what it begins from, by `read`."""
        return [
            (request, max_nodes, given)
            for request, max_nodes in asked
            # Where a pass has failed, it is repeated.
            if (request.tree is None or request.tree.root.ranking is None)
            and request.can_use_drafts
            if (given := read(request.request_id, request.text.token_ids)) is not None
        ]

    def _forget_tree(self, request: HeadRequest) -> None:
        request.tree = request.span = None

    def _advance(self, request: HeadRequest, kept_len: int, token_ids: TokenArray) -> None:
        is_followed = kept_len == len(request.text) and request.tree is not None
        request.text.truncate(kept_len)
        request.text.append(token_ids)
        if is_followed:
            self._learn(request)
        self._forget_tree(request)


# Drafters of one pass: Medusa, P-EAGLE, and blocks (DFlash, DFlash-2 and DSpark).
#
# Medusa's and P-EAGLE's pass gives candidates of several positions, none of which knows the others.
# The candidates of a position are the same behind every path, and a tree is their product: its
# nodes are taken best first by the product of their shares.
#
# A block drafter runs its layers on a block of mask tokens behind the text, and then draws the
# block's tokens one after the other with the target's noise: a chain.  It costs the same for one
# token as for all, so it is drafted as a whole or not at all.
#
# What P-EAGLE and block drafters keep of a text is written beside the target's own keys and values
# after every step (`cluster.draft.head_cache`).


class ProductDrafter(HeadDrafter[Head]):
    """The growth of such trees."""

    @abstractmethod
    def _logits(self, requests: Sequence[HeadRequest], given: Sequence[Any]) -> torch.Tensor:
        """One pass: float32[requests, positions, draft_vocab]."""

    def _draft(
        self, requests: Sequence[HeadRequest], sizes: Sequence[int], given: Sequence[Any]
    ) -> Sequence[Proposal]:
        return list(map(self._grown, requests, sizes, self._logits(requests, given)))

    def _grown(self, request: HeadRequest, max_nodes: int, logits: torch.Tensor) -> Proposal:
        """The best of the product.  logits: float32[positions, draft_vocab]."""
        least, count, tree = self._options.min_survival, self._options.num_children, request.begin()
        root = request.row_context(tree.root)
        contexts = [replace(root, position=root.position + each) for each in range(len(logits))]
        ranked = self._ranked(logits, contexts)
        shares = conditionals(ranked.scores, self._fits_of(request))
        tokens, best = ranked.token_ids[:, :count].tolist(), shares[:, :count].tolist()
        node = tree.root
        for _ in range(1 + max_nodes):
            if (depth := node.depth) < len(logits):
                children = list(zip(tokens[depth], best[depth], strict=True))
                request.expand(node, ranked.row(depth), children)
            if tree.best_leaf_survival() < least:
                break
            node = tree.pop_leaf()
        return request.proposal(max_nodes, least, self._name)


class LastRows:
    """Of each text the last row after the final norm, until the next step."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[int, torch.Tensor]] = {}

    def write(self, rows: Sequence[StepRows]) -> None:
        """See `TextCache`."""
        self._rows = {
            each.request_id: (
                each.first_position + len(each.text_rows),
                each.taps[int(each.text_rows[-1]), 0],
            )
            for each in rows
            if each.taps is not None and each.next_token is not None
        }

    def read(self, request_id: str, token_ids: TokenArray) -> torch.Tensor | None:
        """See `TextCache`."""
        length, hidden = self._rows.get(request_id, (0, None))
        return hidden if length == len(token_ids) - 1 else None


class MedusaDrafter(ProductDrafter[MedusaHead]):
    """Heads on the target's last hidden row, one a position ahead: it drafts from the last step's
    rows alone."""

    kind = "medusa"

    @classmethod
    def kv_layers(cls, options: Any, like: LayerSpec) -> Sequence[LayerSpec]:
        """See `StepReader`: none."""
        return ()

    @property
    def _num_positions(self) -> int:
        return self._head.spec.num_heads

    def _new_cache(self) -> LastRows:
        return LastRows()

    def _logits(self, requests: Sequence[HeadRequest], given: Sequence[Any]) -> torch.Tensor:
        return self._head(torch.stack(list(given)).to(self._dtype)).float()


class PeagleDrafter(ProductDrafter[Eagle3Head]):
    """An EAGLE-3 head that drafts all positions ahead in one pass: P-EAGLE.

    What it keeps of a text is kept as for EAGLE-3, for each of its layers."""

    kind = "peagle"

    @property
    def _num_positions(self) -> int:
        return self._options.num_drafts or self._head.spec.num_drafts

    def _logits(self, requests: Sequence[HeadRequest], given: Sequence[Any]) -> torch.Tensor:
        logits: torch.Tensor = self._head.lm_head(
            block_rows(
                self._head,
                [request.text.token_ids for request in requests],
                given,
                self._num_positions,
            )
        )
        return logits.float()


class BlockDrafter(HeadDrafter[BlockHead]):
    """See `HeadDrafter`."""

    kind = "block"

    @property
    def _num_positions(self) -> int:
        return self._head.spec.num_drafts

    def _draft(
        self, requests: Sequence[HeadRequest], sizes: Sequence[int], given: Sequence[TextContext]
    ) -> Sequence[Proposal]:
        """The blocks' tokens are drawn the first of all blocks first."""
        head, markov = self._head, self._head.markov_head
        texts = [request.text.token_ids for request in requests]
        hidden = block_rows(head, texts, given, head.spec.block_size)  # [blocks, drafts, hidden]
        logits = head.logits(hidden)  # [blocks, drafts, draft_vocab]
        trees = [request.begin() for request in requests]  # not before: a failed pass is repeated
        before = torch.tensor([int(text[-1]) for text in texts], device=hidden.device)
        state = markov.start(len(requests)) if markov is not None else None
        is_greedy = [request.params.temperature == 0.0 for request in requests]
        for draft in range(min(self._num_positions, max(sizes))):
            row, own, seen = hidden[:, draft], logits[:, draft], None
            if markov is not None:
                assert state is not None
                seen = markov.embedded(before)
                bias, state = markov(seen, row, state)
                own = own + bias.float()
            if head.candidate_selector is not None:
                own = head.candidate_selector(own, head.token_map, row, before)
            ends = [
                request.row_context(tree.nodes[-1])
                for request, tree in zip(requests, trees, strict=True)
            ]
            ranked = self._ranked(own, ends)
            # How likely the target draws the best candidate of each row.
            fits = [self._fits_of(request)[draft] for request in requests]
            shares = conditionals(ranked.scores, fits)[:, 0]
            if head.confidence_head is not None:
                # It foresees how often it is right, not how the noise of a draw will fall.
                sure = head.confidence_head(row, seen).double().cpu().numpy()
                shares = np.where(is_greedy, sure, shares)
            drawn = ranked.token_ids[:, 0]
            for place, (request, tree) in enumerate(zip(requests, trees, strict=True)):
                if draft and not (tree.best_leaf_survival() > 0.0 and len(tree) < sizes[place]):
                    continue  # it has ended
                end = tree.pop_leaf() if draft else tree.root
                child = int(drawn[place]), float(shares[place])
                request.expand(end, ranked.row(place), [child])
            before = torch.from_numpy(drawn).to(before)
        # The whole chains: what they would cost is spent.
        return [
            request.proposal(size, 0.0, self._name)
            for request, size in zip(requests, sizes, strict=True)
        ]
