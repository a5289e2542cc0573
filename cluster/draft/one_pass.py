"""Drafters of one pass: Medusa, P-EAGLE, and blocks (DFlash, DFlash-2 and DSpark).

Medusa's and P-EAGLE's pass gives candidates of several positions, none of which knows the others.
The candidates of a position are the same behind every path, and a tree is their product: its nodes
are taken best first by the product of their shares.

A block drafter runs its layers on a block of mask tokens behind the text, and then draws the
block's tokens one after the other with the target's noise: a chain.  It costs the same for one
token as for all, so it is drafted as a whole or not at all.

What P-EAGLE and block drafters keep of a text is written beside the target's own keys and values
after every step (`cluster.draft.head_cache`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cluster.core import Proposal, TokenArray
from cluster.draft.candidates import conditionals
from cluster.draft.head_cache import TextContext, block_rows
from cluster.draft.head_drafter import Head, HeadDrafter, HeadRequest
from cluster.draft.heads.block import BlockHead
from cluster.draft.heads.eagle3 import Eagle3Head
from cluster.draft.heads.medusa import MedusaHead
from cluster.draft.inside import StepRows
from cluster.engine.types import LayerSpec


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
