"""The block drafter: DFlash, DFlash-2 or DSpark inside the target; a block is drafted in one pass.

After every step the drafter's keys and values of the new tokens are written beside the target's own
(`cluster.draft.head_cache`).  A round runs its layers once, on a block of mask tokens behind the
text, and then draws the block's tokens one after the other with the target's noise: a chain.  It
costs the same for one token as for all, so it is drafted as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cluster.core import Proposal
from cluster.draft.head_cache import TextContext, block_rows
from cluster.draft.head_drafter import HeadDrafter, HeadRequest
from cluster.draft.heads.block import BlockHead
from cluster.draft.sharpness import conditionals


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
        last = [int(text[-1]) for text in texts]
        before = torch.tensor(last, device=hidden.device)
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
