"""The Medusa drafter: heads on the target's last hidden row, one a position ahead, in one pass.

A tree is the product of the heads' candidates: see `cluster.draft.product`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.draft.base import DrafterContext
from cluster.draft.head_options import MedusaOptions
from cluster.draft.heads.load import load_head_of, made_ready, target_shape
from cluster.draft.heads.medusa import MedusaHead
from cluster.draft.inside import StepRows, StepWants, host_of
from cluster.draft.product import ProductDrafter
from cluster.draft.tree_request import TreeRequest
from cluster.draft.vocabulary import written_vocabulary
from cluster.models.made_for import folder_made_for
from cluster.models.resolve import resolve_head


class MedusaDrafter(ProductDrafter[torch.Tensor]):
    """See `Drafter` and `StepReader`.  It drafts from the rows of the last step alone."""

    @torch.inference_mode()
    def __init__(self, context: DrafterContext, options: MedusaOptions) -> None:
        host = host_of(context.target, context.name, "medusa")
        folder = resolve_head(options.model)
        self.made_for = folder_made_for(folder)
        head = load_head_of(MedusaHead, folder, target_shape(host), host.weight)
        vocabulary, order = written_vocabulary(head.token_map.numpy(), host.vocab_size)
        super().__init__(context, host, options, head.spec.num_heads, vocabulary)
        self._head = made_ready(head, host)
        self._order = None if order is None else torch.from_numpy(order).to(host.device)
        self.wants = StepWants((-1,))
        self._rows: dict[str, tuple[int, torch.Tensor]] = {}
        size = head.spec.hidden_size
        self._warm_up_with(torch.zeros(size, dtype=self._dtype, device=host.device))

    def read(self, rows: Sequence[StepRows]) -> None:
        """See `StepReader`: of each text the last row is kept, until the next step."""
        self._rows = {
            each.request_id: (
                each.first_position + len(each.text_rows),
                each.taps[int(each.text_rows[-1]), 0],
            )
            for each in rows
            if each.taps is not None and each.next_token is not None
        }

    def _input(self, request: TreeRequest) -> torch.Tensor | None:
        length, hidden = self._rows.get(request.request_id, (0, None))
        return hidden if length == len(request.text) - 1 else None

    def _logits(
        self, requests: Sequence[TreeRequest], inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        hidden = torch.stack(list(inputs)).to(self._dtype)
        logits: torch.Tensor = self._head(hidden).float()
        return logits if self._order is None else logits[:, :, self._order]
