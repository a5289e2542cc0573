"""Objectives that train a drafter's next-token distribution to match the target's."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from transformers import LlamaForCausalLM

from cluster.train.trainer import Objective, mixed_precision

Loss = Literal["kl", "acceptance"]


def distillation_loss(drafter: nn.Module, target: LlamaForCausalLM, loss: Loss = "kl") -> Objective:
    """Mean distance of the two distributions over all positions; no gradient for the target."""
    target.requires_grad_(False).eval()
    precision = mixed_precision()

    def objective(windows: torch.Tensor) -> torch.Tensor:
        inputs = windows[:, :-1]
        with precision:
            with torch.no_grad():
                wanted = target(input_ids=inputs, use_cache=False).logits
            logits = drafter(input_ids=inputs, use_cache=False).logits
        wanted_log_probs = torch.log_softmax(wanted.float(), dim=-1)
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        if loss == "acceptance":
            return negative_log_acceptance(log_probs, wanted_log_probs)
        return kl_divergence(log_probs, wanted_log_probs)

    return objective


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
