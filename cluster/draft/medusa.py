"""The Medusa drafter: heads on the target's last hidden row, one a position ahead, in one pass.

A tree is the product of the heads' candidates: see `cluster.draft.product`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.draft.base import DrafterContext
from cluster.draft.head_drafter import HeadRequest
from cluster.draft.head_options import MedusaOptions
from cluster.draft.heads.medusa import MedusaHead
from cluster.draft.heads.ready import ready_head
from cluster.draft.inside import StepRows, StepWants, host_of
from cluster.draft.product import ProductDrafter


class MedusaDrafter(ProductDrafter[MedusaHead, torch.Tensor]):
    """See `Drafter` and `StepReader`.  It drafts from the rows of the last step alone."""

    @torch.inference_mode()
    def __init__(self, context: DrafterContext, options: MedusaOptions) -> None:
        host = host_of(context.target, context.name, "medusa")
        ready = ready_head(MedusaHead, options.model, host)
        spec = ready.head.spec
        super().__init__(context, ready, options, spec.num_heads)
        self.wants = StepWants((-1,))
        self._rows: dict[str, tuple[int, torch.Tensor]] = {}
        self._warm_up_with(torch.zeros(spec.hidden_size, dtype=self._dtype, device=host.device))

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

    def _input(self, request: HeadRequest) -> torch.Tensor | None:
        length, hidden = self._rows.get(request.request_id, (0, None))
        return hidden if length == len(request.text) - 1 else None

    def _logits(
        self, requests: Sequence[HeadRequest], inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        hidden = torch.stack(list(inputs)).to(self._dtype)
        logits: torch.Tensor = self._head(hidden).float()
        return logits
