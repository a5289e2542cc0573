"""The base of drafters with a draft head on the target's hidden rows.

Their trees are grown from the target's rows behind the text, so that each ends with a commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import torch

from cluster.core import DraftTask, Proposal, TokenArray
from cluster.draft.base import DrafterContext
from cluster.draft.head_cache import Span, TextCache, TextRows
from cluster.draft.heads.load import layers_of, ready_head
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
