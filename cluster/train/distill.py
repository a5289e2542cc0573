"""Objectives that train a drafter's next-token distribution to match the target's."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from transformers import LlamaForCausalLM

Loss = Literal["kl", "acceptance"]


class DistillationLoss(nn.Module):
    """Mean distance of the two distributions over all positions; no gradient for the target."""

    def __init__(self, drafter: nn.Module, target: LlamaForCausalLM, loss: Loss = "kl") -> None:
        super().__init__()
        self.drafter = drafter
        self.target = target.requires_grad_(False).eval()
        self._distance = negative_log_acceptance if loss == "acceptance" else kl_divergence

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """windows: int64[rows, length + 1]; the last token of each is not read."""
        inputs = windows[:, :-1]
        with torch.no_grad():
            wanted = self.target(input_ids=inputs, use_cache=False).logits
        logits = self.drafter(input_ids=inputs, use_cache=False).logits
        return self._distance(
            torch.log_softmax(logits.float(), dim=-1), torch.log_softmax(wanted.float(), dim=-1)
        )


def kl_divergence(draft_log_probs: torch.Tensor, target_log_probs: torch.Tensor) -> torch.Tensor:
    """KL(target || drafter) in nats, the mean over all rows of [..., vocab]."""
    difference = target_log_probs - draft_log_probs
    return (target_log_probs.exp() * difference).sum(dim=-1).mean()


def negative_log_acceptance(
    draft_log_probs: torch.Tensor, target_log_probs: torch.Tensor
) -> torch.Tensor:
    """-log sum_i min(p_i, q_i), the mean over all rows.  Leviathan et al. 2023, corollary 3.6."""
    overlap = torch.minimum(draft_log_probs.exp(), target_log_probs.exp()).sum(dim=-1)
    return -overlap.clamp(min=1e-6).log().mean()
