"""An early exit as it is trained: it reads the rows behind one of the target's layers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from cluster.draft.heads.exit import ARCHITECTURE, ExitHead
from cluster.errors import ConfigError
from cluster.models.made_for import MadeFor
from cluster.train.chat_heads import HeadBatch, Learner, save_head


class ExitLearner(Learner):
    """The exit that serves.  Behind right drafts its rows are those of the text, so that one depth
    is all there is to learn; chains of more are measured."""

    _output: torch.Tensor

    def __init__(
        self,
        head: ExitHead,
        network: PreTrainedModel,
        target_ids: torch.Tensor,
        column: int,
        depth: int = 1,
    ) -> None:
        """target_ids: int64[n], the tokens among which it learns to choose.  column: of the exit
        layer's output in the states."""
        super().__init__()
        self.depth = depth
        self.head = head
        self._norm = _final_norm(network)
        output = network.get_output_embeddings().weight.detach()
        self._vocab_size = len(output)
        self.register_buffer("_output", output[target_ids], persistent=False)
        self._column = column

    def drafts(self, batch: HeadBatch, first: int) -> list[torch.Tensor]:
        """See `Learner`."""
        with torch.no_grad():
            rows = batch.tapped(self._column)[:, first + 1 :]
            rows = self._norm(rows.to(self._output.dtype))
        found = self.head(rows)
        return [found[:, ahead:] for ahead in range(self.depth)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Learner`."""
        found: torch.Tensor = hidden @ self._output.T
        return found

    def save(self, folder: Path, made_for: MadeFor) -> None:
        """See `Learner`: there is no public format; ours is that of `cluster.draft.heads.exit`."""
        config = {
            "architectures": [ARCHITECTURE],
            "exit_layer": self.head.exit_layer,
            "hidden_size": self._output.shape[1],
            "vocab_size": self._vocab_size,
        }
        save_head(folder, self.head.state_dict(), config, made_for)


def new_exit(network: PreTrainedModel, exit_layer: int) -> ExitHead:
    """One that says what the untrained exit says; raises ConfigError for a layer that is none."""
    num_layers = network.config.get_text_config().num_hidden_layers
    if not 0 < exit_layer < num_layers:
        raise ConfigError(
            f"exit layer {exit_layer}: the target has {num_layers} layers; name one between them",
            param="exit_layer",
        )
    return ExitHead(exit_layer, network.get_output_embeddings().weight.shape[1]).train()


def _final_norm(network: PreTrainedModel) -> nn.Module:
    found = getattr(network.base_model, "norm", None)
    if not isinstance(found, nn.Module):
        raise ConfigError(
            f"{type(network).__name__}: its final norm is not called `norm`; early exits cannot "
            "be trained for it"
        )
    return found.requires_grad_(False)
