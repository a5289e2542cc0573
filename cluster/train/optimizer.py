"""Muon for the hidden matrices, AdamW for everything else, and one schedule for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Matrices between tokens and hidden rows, by a part of their name.
_OUTER = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak learning rates and the trapezoid that scales them.

    Rates rise linearly during the first `warmup` part of training, stay constant, and fall linearly
    to zero during the last `decay` part.
    """

    muon: float = 0.02
    adamw: float = 0.004
    warmup: float = 0.02
    decay: float = 0.55

    def scale(self, progress: float) -> float:
        """The factor on both rates when the part `progress` (0 to 1) of the budget is spent."""
        return max(0.0, min(1.0, (progress + 1e-3) / self.warmup, (1.0 - progress) / self.decay))


class Optimizers:
    """The two optimisers of named parameters, stepped together."""

    def __init__(self, trained: Mapping[str, nn.Parameter], rates: Rates) -> None:
        hidden: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in trained.items():
            is_hidden = parameter.ndim == 2 and not any(each in name for each in _OUTER)
            (hidden if is_hidden else others).append(parameter)
        self._parameters = hidden + others
        self._rates = rates
        # Each Newton-Schulz iteration costs about 2 % of a step on two cores; four nearly converge.
        self._muon = torch.optim.Muon(
            hidden, lr=rates.muon, weight_decay=0.03, momentum=0.95, ns_steps=4
        )
        self._adamw = torch.optim.AdamW(
            others, lr=rates.adamw, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0
        )

    def step(self, progress: float) -> None:
        """Apply the accumulated gradients with the rates at `progress`, and clear them."""
        scale = self._rates.scale(progress)
        for group in self._muon.param_groups:
            group["lr"] = self._rates.muon * scale
        for group in self._adamw.param_groups:
            group["lr"] = self._rates.adamw * scale
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._muon.step()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._adamw.step()
        self._muon.zero_grad(set_to_none=True)
        self._adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._muon.load_state_dict(state["muon"])
        self._adamw.load_state_dict(state["adamw"])
