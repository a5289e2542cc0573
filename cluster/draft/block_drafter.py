"""The block drafter: DFlash or DSpark inside the target, which drafts a whole block in one pass.

After every step the drafter's keys and values of the new tokens are written beside the target's own
(`cluster.draft.block_cache`).  A round runs its layers once, on a block of mask tokens behind the
text, and then draws the block's tokens one after the other with the target's noise: a chain.  It
costs the same for one token as for all, so it is drafted as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from cluster.core import DraftTask, Proposal
from cluster.draft.base import DrafterContext
from cluster.draft.block_cache import BlockCache, BlockContext, layers
from cluster.draft.candidates import rank_rows
from cluster.draft.head_drafter import NO_LIMIT, HeadDrafter
from cluster.draft.head_options import BlockOptions
from cluster.draft.heads import block_files
from cluster.draft.heads.block import BlockHead, Sight
from cluster.draft.heads.checkpoint import read_config
from cluster.draft.heads.load import load_head_of, made_ready, target_shape
from cluster.draft.inside import StepRows, StepWants, host_of
from cluster.draft.live_tree import ROOT, LiveTree
from cluster.draft.sharpness import conditionals
from cluster.draft.tree_request import TreeRequest
from cluster.draft.vocabulary import written_vocabulary
from cluster.engine.types import LayerSpec
from cluster.models.made_for import folder_made_for
from cluster.models.resolve import resolve_head

Array = npt.NDArray[np.float64]


@dataclass(slots=True, eq=False)
class BlockRequest(TreeRequest):
    """failed_len: the length of the text of which the layers made nothing but NaN."""

    failed_len: int = -1


@dataclass(slots=True, eq=False)
class _Block:
    """A request's block as it is drawn.  end: the last node, None where the chain has ended."""

    request: BlockRequest
    max_nodes: int
    end: int | None = ROOT
    context: BlockContext | None = None


class BlockDrafter(HeadDrafter[BlockRequest]):
    """See `Drafter` and `StepReader`."""

    def __init__(self, context: DrafterContext, options: BlockOptions) -> None:
        host = host_of(context.target, context.name, "block")
        folder = resolve_head(options.model)
        self.made_for = folder_made_for(folder)
        head = load_head_of(BlockHead, folder, target_shape(host), host.weight)
        # Those further ahead are less sure.
        super().__init__(context, host, BlockRequest, head.spec.num_drafts)
        self._vocabulary, order = written_vocabulary(head.token_map.numpy(), host.vocab_size)
        if order is not None:
            head.reorder(torch.from_numpy(order))
        self._head = made_ready(head, host)
        self.wants = StepWants(head.spec.taps)
        self._cache = BlockCache(host, head, self._dtype)
        self._options = options
        self._warm_up(host.device)

    @torch.inference_mode()
    def _warm_up(self, device: torch.device) -> None:
        spec = self._head.spec
        size = len(spec.taps) * spec.target_hidden_size
        fused = self._head.fuse(torch.zeros(1, size, dtype=self._dtype, device=device))
        places = torch.zeros(1, dtype=torch.int64, device=device)
        context = BlockContext(places, tuple(self._head.keys_values(fused, places)))
        block = _Block(self._request_of_nobody(), 1, context=context)
        hidden = self._run([block])
        self._draw([block], hidden, self._head.logits(hidden).float())

    @classmethod
    def kv_layers(cls, options: BlockOptions, like: LayerSpec) -> Sequence[LayerSpec]:
        """See `StepReader`."""
        folder = resolve_head(options.model)
        config = block_files.layers_of(folder, read_config(folder))
        assert config.num_key_value_heads is not None
        return layers(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, like)

    @torch.inference_mode()
    def read(self, rows: Sequence[StepRows]) -> None:
        """See `StepReader`: everything is kept in the target's pages."""
        self._cache.write(rows)

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`.  The chains are complete after one pass."""
        blocks = [_Block(*asked) for asked in self._asked(tasks) if asked[0].tree is None]
        begun = [block for block in blocks if self._begin(block)]
        if not begun:
            return []
        hidden = self._run(begun)
        self._draw(begun, hidden, self._head.logits(hidden).float())
        return [
            # The whole chain: what it would cost is spent.
            replace(each.request.proposal(each.max_nodes, 0.0, self._name), is_complete=True)
            for each in begun
            if each.request.tree is not None
        ]

    def _begin(self, block: _Block) -> bool:
        """Whether the text has what a block behind it needs."""
        request = block.request
        text = request.text.token_ids
        if not request.can_use_drafts or request.failed_len == len(text):
            return False
        block.context = self._cache.read(request.request_id, text, self._options.context)
        return block.context is not None

    def _run(self, blocks: Sequence[_Block]) -> torch.Tensor:
        """One pass over all blocks: [blocks, drafts, hidden]."""
        device = self._head.token_map.device
        lengths = [len(block.request.text) for block in blocks]
        anchors = [int(block.request.text.token_ids[-1]) for block in blocks]
        contexts = [block.context for block in blocks if block.context is not None]
        size, sights = self._head.spec.block_size, self._head.spec.sights

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            parts = zip(*(torch.split(each, size) for each in (query, key, value)), strict=True)
            found = [
                _attend(sights[layer], context, layer, length - 1, *part)
                for context, length, part in zip(contexts, lengths, parts, strict=True)
            ]
            return torch.cat(found)

        positions = torch.tensor([length - 1 for length in lengths], device=device)
        hidden: torch.Tensor = self._head(torch.tensor(anchors, device=device), positions, attend)
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
                _fail(block)
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
                _fail(block)
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


def _fail(block: _Block) -> None:
    block.request.tree, block.end = None, None
    block.request.failed_len = len(block.request.text)


def _attend(
    sight: Sight, context: BlockContext, layer: int, first: int, query: torch.Tensor,
    key: torch.Tensor, value: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One block's rows, the first of which stands at position `first`: [rows, heads, dim]."""
    keys, values = context.layers[layer]
    places = first + torch.arange(len(query), device=query.device)
    mask: torch.Tensor | None = None
    if sight.window is not None or sight.is_causal:
        distance = places[:, None] - torch.cat((context.positions, places))
        mask = torch.ones_like(distance, dtype=torch.bool)
        if sight.window is not None:
            mask &= distance < sight.window
        if sight.is_causal:
            mask &= distance >= 0
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        torch.cat((keys, key)).transpose(0, 1)[None],
        torch.cat((values, value)).transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)
