"""A trained early exit: what turns the rows between two of the target's layers into its last ones.

A row behind the exit layer, by the target's final norm, is scaled and passed through one linear
layer beside itself, and the target's output layer reads it (after Elhoushi et al., "LayerSkip",
2024, and Belrose et al., "Eliciting Latent Predictions with the Tuned Lens", 2023; the target is
not trained).  All of it is linear, so that it is served as an output layer of the exit's own.
"""

from __future__ import annotations

import torch
from torch import nn

from cluster.draft.heads.checkpoint import HeadConfig, HeadTarget, read_tensors

ARCHITECTURE = "EarlyExit"


class ExitHead(nn.Module):
    """scale: [hidden].  translator: hidden -> hidden.  exit_layer: the target's layers that run."""

    def __init__(self, exit_layer: int, hidden_size: int) -> None:
        """Begins as the untrained exit."""
        super().__init__()
        self.exit_layer = exit_layer
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.translator = nn.Linear(hidden_size, hidden_size, bias=False)
        nn.init.zeros_(self.translator.weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., hidden] behind the exit layer and the final norm -> what the output layer reads."""
        scaled = rows * self.scale
        return scaled + self.translator(scaled)

    @torch.no_grad()
    def output(self, weight: torch.Tensor) -> torch.Tensor:
        """The output layer's weight, [vocab, hidden], with the exit in it."""
        wide = weight.float()
        both = wide + wide @ self.translator.weight.to(wide)
        # In bfloat16's numbers, which our kernels keep in half the memory that each pass reads.
        return (both * self.scale.to(wide)).to(torch.bfloat16).to(weight.dtype)


def load(config: HeadConfig, target: HeadTarget) -> ExitHead:
    """The exit of a folder, which brings all that it has; raises ConfigError where it does not fit
    the target."""
    said = config.data
    size = config.size("hidden_size", said.get("hidden_size", 0), target.hidden_size)
    config.size("vocab_size", said.get("vocab_size", 0), target.vocab_size)
    exit_layer = int(said.get("exit_layer", 0))
    if not 0 < exit_layer < target.num_layers:
        raise config.refused(
            f"its exit_layer {exit_layer} does not lie between the target's {target.num_layers} "
            "layers"
        )
    tensors = read_tensors(config.folder, str, target)
    with target.device:
        head = ExitHead(exit_layer, size)
    tensors.fill(head, {})
    return head.eval().requires_grad_(False)
