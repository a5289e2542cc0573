"""The block drafter: DFlash, DFlash-2 or DSpark inside the target; a block is drafted in one pass.

After every step the drafter's keys and values of the new tokens are written beside the target's own
(`cluster.draft.head_cache`).  A round runs its layers once, on a block of mask tokens behind the
text, and then draws the block's tokens one after the other with the target's noise: a chain.  It
costs the same for one token as for all, so it is drafted as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from cluster.core import Proposal
from cluster.draft.head_cache import block_rows
from cluster.draft.head_drafter import Begun, HeadDrafter, HeadRequest
from cluster.draft.heads.block import BlockHead
from cluster.draft.live_tree import ROOT
from cluster.draft.sharpness import conditionals


class BlockDrafter(HeadDrafter[BlockHead]):
    """See `HeadDrafter`."""

    kind = "block"

    @property
    def _num_positions(self) -> int:
        return self._head.spec.num_drafts

    def _draft(self, begun: Sequence[Begun]) -> Sequence[Proposal]:
        requests, sizes, contexts = zip(*begun, strict=True)
        texts = [request.text.token_ids for request in requests]
        hidden = block_rows(self._head, texts, contexts, self._head.spec.block_size)
        self._draw(requests, sizes, hidden)
        return [
            # The whole chain: what it would cost is spent.
            replace(request.proposal(size, 0.0, self._name), is_complete=True)
            for request, size in zip(requests, sizes, strict=True)
        ]

    def _draw(
        self, requests: Sequence[HeadRequest], sizes: Sequence[int], hidden: torch.Tensor
    ) -> None:
        """Draw the blocks' tokens, the first of all blocks first.

        sizes: nodes at most.  hidden: [blocks, drafts, hidden]."""
        head, markov = self._head, self._head.markov_head
        logits = head.logits(hidden)  # [blocks, drafts, draft_vocab]
        for request in requests:  # not before: after a failed pass each is asked for alone
            request.begin()
        last = [int(request.text.token_ids[-1]) for request in requests]
        before = torch.tensor(last, device=hidden.device)
        state = markov.start(len(requests)) if markov is not None else None
        ends = dict.fromkeys(range(len(requests)), ROOT)  # of the chains that go on, by block
        for draft in range(self._num_positions):
            row, own, seen, sure = hidden[:, draft], logits[:, draft], None, None
            if markov is not None:
                assert state is not None
                seen = markov.embedded(before)
                bias, state = markov(seen, row, state)
                own = own + bias.float()
            if head.candidate_selector is not None:
                own = head.candidate_selector(own, head.token_map, row, before)
            if head.confidence_head is not None:
                sure = head.confidence_head(row, seen).double().cpu().numpy()
            blocks = list(ends)
            drawn = self._extend(requests, sizes, ends, own[blocks], sure, draft)
            if not ends:
                return
            before[blocks] = torch.from_numpy(drawn).to(before)

    def _extend(
        self,
        requests: Sequence[HeadRequest],
        sizes: Sequence[int],
        ends: dict[int, int],
        logits: torch.Tensor,
        sure: npt.NDArray[np.float64] | None,
        draft: int,
    ) -> npt.NDArray[np.int64]:
        """Give each chain that goes on its next token, and return these.

        logits: float32[chains, draft_vocab].  sure: of each block how likely it is right, by the
        confidence head."""
        chains = [(index, requests[index], end) for index, end in ends.items()]
        ranked = self._ranked(logits, [request.row_context(end) for _, request, end in chains])
        fits = [self._fits_of(request)[draft] for _, request, _ in chains]
        # How likely the target draws the best candidate of each row.
        shares = conditionals(ranked.scores, fits)[:, 0]
        if sure is not None:
            # The head foresees how often it is right, not how the noise of a draw will fall.
            is_greedy = [request.params.temperature == 0.0 for _, request, _ in chains]
            shares = np.where(is_greedy, sure[list(ends)], shares)
        drawn = ranked.token_ids[:, 0]
        for place, (index, request, end) in enumerate(chains):
            child = int(drawn[place]), float(shares[place])
            request.expand(end, ranked.row(place), [child])
            tree = request.live
            if tree.best_leaf_survival() > 0.0 and len(tree) < sizes[index]:
                ends[index] = tree.pop_leaf()
            else:
                del ends[index]
        return drawn
