"""The block drafter: DFlash or DSpark inside the target, which drafts a whole block in one pass.

After every step the drafter's keys and values of the new tokens are written beside the target's own
(`cluster.draft.head_cache`).  A round runs its layers once, on a block of mask tokens behind the
text, and then draws the block's tokens one after the other with the target's noise: a chain.  It
costs the same for one token as for all, so it is drafted as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from cluster.core import Proposal
from cluster.draft.head_cache import block_rows
from cluster.draft.head_drafter import Begun, HeadDrafter, HeadRequest, sound
from cluster.draft.heads.block import BlockHead
from cluster.draft.live_tree import ROOT
from cluster.draft.sharpness import conditionals


@dataclass(slots=True, eq=False)
class _Block:
    """A request's block as it is drawn.  end: the last node, None where the chain has ended."""

    request: HeadRequest
    max_nodes: int
    end: int | None = ROOT


class BlockDrafter(HeadDrafter[BlockHead]):
    """See `HeadDrafter`."""

    kind = "block"

    @property
    def _num_positions(self) -> int:
        return self._head.spec.num_drafts

    def _draft(self, begun: Sequence[Begun]) -> Sequence[Proposal]:
        texts = [request.text.token_ids for request, _, _ in begun]
        contexts, blocks = [each[2] for each in begun], [_Block(*each[:2]) for each in begun]
        hidden = block_rows(self._head, texts, contexts, self._head.spec.block_size)
        self._draw(blocks, hidden, self._head.lm_head(hidden).float())
        return [
            # The whole chain: what it would cost is spent.
            replace(each.request.proposal(each.max_nodes, 0.0, self._name), is_complete=True)
            for each in blocks
            if each.request.tree is not None
        ]

    def _draw(self, blocks: Sequence[_Block], hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Draw the blocks' tokens, the first of all blocks first.  hidden: [blocks, drafts,
        hidden].  logits: float32[blocks, drafts, draft_vocab]."""
        head, markov, requests = self._head, self._head.markov_head, [b.request for b in blocks]
        last = [int(request.text.token_ids[-1]) for request in requests]
        for request in requests:
            request.begin()
        sound(requests, logits)
        before = torch.tensor(last, device=hidden.device)
        state = markov.start(len(blocks)) if markov is not None else None
        for draft in range(self._num_positions):
            row, own, seen = hidden[:, draft], logits[:, draft], None
            if markov is not None:
                assert state is not None
                seen = markov.embedded(before)
                bias, state = markov(seen, row, state)
                own = own + bias.float()
            sure = None
            if head.confidence_head is not None:
                sure = head.confidence_head(row, seen).double().cpu().numpy()
            if not (drawn := self._extend(blocks, own, sure, draft)):
                return
            before = torch.tensor(
                [drawn.get(index, 0) for index in range(len(blocks))], device=hidden.device
            )

    def _extend(
        self,
        blocks: Sequence[_Block],
        logits: torch.Tensor,
        sure: npt.NDArray[np.float64] | None,
        draft: int,
    ) -> dict[int, int]:
        """Give each chain that has not ended its next token; returns them by block.

        logits: float32[blocks, draft_vocab].  sure: how likely each is right, by the confidence
        head."""
        open_ = [
            index
            for index, block in enumerate(blocks)
            if block.end is not None and block.request.tree is not None
        ]
        open_ = [open_[row] for row in sound([blocks[i].request for i in open_], logits[open_])]
        if not open_:
            return {}
        ends = [(blocks[index], blocks[index].end or ROOT) for index in open_]
        rows = [block.request.row_context(end) for block, end in ends]
        ranked = self._ranked(logits[open_], rows)
        fits = [self._fits_of(block.request)[draft] for block, _ in ends]
        # How likely the target draws the best candidate of each row.
        shares = conditionals(ranked.scores, fits)[:, 0]
        if sure is not None:
            # The head foresees how often it is right, not how the noise of a draw will fall.
            is_greedy = [block.request.params.temperature == 0.0 for block, _ in ends]
            shares = np.where(is_greedy, sure[open_], shares)
        drawn: dict[int, int] = {}
        for place, (index, (block, end)) in enumerate(zip(open_, ends, strict=True)):
            request, token = block.request, int(ranked.token_ids[place, 0])
            request.expand(end, ranked.row(place), [(token, float(shares[place]))])
            tree = request.tree
            assert tree is not None
            is_longer = tree.best_leaf_survival() > 0.0
            block.end = tree.pop_leaf() if is_longer and len(tree) < block.max_nodes else None
            if block.end is not None:
                drawn[index] = token
        return drawn
