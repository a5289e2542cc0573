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
from cluster.draft.base import DrafterContext
from cluster.draft.candidates import rank_rows
from cluster.draft.head_attention import Part, Span, SpanAttention
from cluster.draft.head_cache import BlockCache, TextContext, layers_like
from cluster.draft.head_drafter import NO_LIMIT, HeadRequest, OnePassDrafter
from cluster.draft.head_options import BlockOptions
from cluster.draft.heads import block_files
from cluster.draft.heads.block import BlockHead, Sight
from cluster.draft.heads.checkpoint import read_config
from cluster.draft.heads.load import ready_head
from cluster.draft.inside import IndexArray, StepWants, host_of
from cluster.draft.live_tree import ROOT, LiveTree
from cluster.draft.sharpness import conditionals
from cluster.engine.types import LayerSpec
from cluster.models.resolve import resolve_head

Array = npt.NDArray[np.float64]


@dataclass(slots=True, eq=False)
class _Block:
    """A request's block as it is drawn.  end: the last node, None where the chain has ended."""

    request: HeadRequest
    max_nodes: int
    context: TextContext
    end: int | None = ROOT

    def fail(self) -> None:
        """End the chain: its logits are no numbers."""
        self.request.fail()
        self.end = None


class BlockDrafter(OnePassDrafter[BlockHead, TextContext]):
    """See `Drafter` and `StepReader`."""

    _cache: BlockCache

    def __init__(self, context: DrafterContext, options: BlockOptions) -> None:
        host = host_of(context.target, context.name, "block")
        ready = ready_head(BlockHead, options.model, host)
        # Those further ahead are less sure.
        super().__init__(context, ready, HeadRequest, ready.head.spec.num_drafts)
        self.wants = StepWants(self._head.spec.taps)
        self._cache = BlockCache(host, self._head, self._dtype, options.context)
        self._options = options
        self._warm_up(host.device)

    @torch.inference_mode()
    def _warm_up(self, device: torch.device) -> None:
        spec = self._head.spec
        size = len(spec.taps) * spec.target_hidden_size
        fused = self._head.fuse(torch.zeros(1, size, dtype=self._dtype, device=device))
        places = torch.zeros(1, dtype=torch.int64, device=device)
        held = tuple(self._head.keys_values(fused, places))
        self._drafted([(self._request_of_nobody(), 1, TextContext(np.zeros(1, np.int64), held))])

    @classmethod
    def kv_layers(cls, options: BlockOptions, like: LayerSpec) -> Sequence[LayerSpec]:
        """See `StepReader`."""
        folder = resolve_head(options.model)
        config = block_files.layers_of(folder, read_config(folder))
        assert config.num_key_value_heads is not None
        shape = (config.num_key_value_heads, config.head_dim)
        return layers_like(like, [shape] * config.num_hidden_layers)

    def _input(self, request: HeadRequest) -> TextContext | None:
        return self._cache.read(request.request_id, request.text.token_ids)

    def _drafted(self, asked: Sequence[tuple[HeadRequest, int, TextContext]]) -> list[Proposal]:
        blocks = [_Block(*each) for each in asked]
        hidden = self._run(blocks)
        self._draw(blocks, hidden, self._head.logits(hidden).float())
        return [
            # The whole chain: what it would cost is spent.
            replace(each.request.proposal(each.max_nodes, 0.0, self._name), is_complete=True)
            for each in blocks
            if each.request.tree is not None
        ]

    def _run(self, blocks: Sequence[_Block]) -> torch.Tensor:
        """One pass over all blocks: [blocks, drafts, hidden]."""
        device = self._head.token_map.device
        lengths = [len(block.request.text) for block in blocks]
        anchors = [int(block.request.text.token_ids[-1]) for block in blocks]
        size, sights = self._head.spec.block_size, self._head.spec.sights
        parts: list[Part] = []
        for block, length in zip(blocks, lengths, strict=True):
            places = length - 1 + np.arange(size)
            masks = {
                sight: _mask(sight, block.context.positions, places, device)
                for sight in set(sights)
            }
            layers = [masks[sight] for sight in sights]
            parts.append(Part(Span(block.context.layers), size, layers))
        positions = torch.tensor([length - 1 for length in lengths], device=device)
        hidden: torch.Tensor = self._head(
            torch.tensor(anchors, device=device), positions, SpanAttention(parts)
        )
        return hidden

    def _draw(self, blocks: Sequence[_Block], hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Draw the blocks' tokens, the first of all blocks first.  hidden: [blocks, drafts,
        hidden].  logits: float32[blocks, drafts, draft_vocab]."""
        head = self._head
        markov = head.markov_head
        for block, is_sound in zip(
            blocks, torch.isfinite(logits.sum(dim=(1, 2))).tolist(), strict=True
        ):
            request = block.request
            request.tree, request.root_len = LiveTree(), len(request.text)
            if not is_sound:
                block.fail()
        before = torch.tensor(
            [int(block.request.text.token_ids[-1]) for block in blocks], device=hidden.device
        )
        state = markov.start(len(blocks)) if markov is not None else None
        for draft in range(head.spec.num_drafts):
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
        self, blocks: Sequence[_Block], logits: torch.Tensor, sure: Array | None, draft: int
    ) -> dict[int, int]:
        """Give each chain that has not ended its next token; returns them by block.

        logits: float32[blocks, draft_vocab].  sure: how likely each is right, by the confidence
        head."""
        is_finite = torch.isfinite(logits.sum(dim=1)).tolist()
        for block, is_sound in zip(blocks, is_finite, strict=True):
            if block.end is not None and not is_sound:
                block.fail()
        open_ = [index for index, block in enumerate(blocks) if block.end is not None]
        if not open_:
            return {}
        ends = [(blocks[index], blocks[index].end or ROOT) for index in open_]
        ranked = rank_rows(
            logits[open_],
            [block.request.row_context(end) for block, end in ends],
            self._options.num_candidates,
            self._vocabulary,
        )
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
            request.expand(end, ranked.row(place), [(token, float(shares[place]))], NO_LIMIT)
            tree = request.tree
            assert tree is not None
            is_longer = tree.best_leaf_survival() > 0.0
            block.end = tree.pop_leaf() if is_longer and len(tree) < block.max_nodes else None
            if block.end is not None:
                drawn[index] = token
        return drawn


def _mask(
    sight: Sight, held: IndexArray, places: IndexArray, device: torch.device
) -> torch.Tensor | None:
    """Whom a block's rows at `places` see: bool[rows, held and rows]; None = all.

    held: int64[n], positions of the text."""
    if sight.window is None and not sight.is_causal:
        return None
    distance = places[:, None] - np.concatenate((held, places))
    mask = np.ones_like(distance, dtype=np.bool_)
    if sight.window is not None:
        mask &= distance < sight.window
    if sight.is_causal:
        mask &= distance >= 0
    return torch.from_numpy(mask).to(device)
