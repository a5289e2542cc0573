"""Medusa heads and early exits as they are trained: the target's own output layer reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cluster.draft.heads.exit import ARCHITECTURE, ExitHead
from cluster.draft.heads.medusa import MedusaHead, MedusaSpec
from cluster.errors import ConfigError
from cluster.models.made_for import MadeFor
from cluster.train.chat_heads import HeadBatch, Learner
from cluster.train.made_for import save_head


class FixedOutputLearner(Learner):
    """The module that serves, read by rows of the output layer."""

    _output: torch.Tensor

    def __init__(
        self, network: PreTrainedModel, head: Any, target_ids: torch.Tensor, column: int, depth: int
    ) -> None:
        """network: the target.  target_ids: int64[n], the tokens among which it learns to choose; a
        part of them is enough to learn from, and quicker.  column: of the rows that it takes in the
        states."""
        super().__init__()
        self.head = head
        self.depth = depth
        output = network.get_output_embeddings().weight.detach()
        self._vocab_size, self._size = output.shape
        self.register_buffer("_output", output[target_ids], persistent=False)
        self._column = column

    def rows(self, batch: HeadBatch) -> torch.Tensor:
        """What it takes along conversations: [rows, width, hidden]."""
        return batch.tapped(self._column).to(self._output.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Learner`."""
        return hidden @ self._output.T


class MedusaLearner(FixedOutputLearner):
    """Every head reads the target's last hidden row."""

    def __init__(
        self, network: PreTrainedModel, head: MedusaHead, target_ids: torch.Tensor, column: int
    ) -> None:
        super().__init__(network, head, target_ids, column, head.spec.num_heads)

    def drafts(self, batch: HeadBatch, first: int) -> list[torch.Tensor]:
        """See `Learner`."""
        rows = self.rows(batch)[:, first:-1]
        blocks = enumerate(self.head.blocks.children())
        return [block(rows)[:, : rows.shape[1] - depth] for depth, block in blocks]

    def save(self, folder: Path, made_for: MadeFor) -> None:
        """See `Learner`: vLLM's format, with the target's own output layer."""
        spec = self.head.spec
        tensors = {
            f"blocks.{name}": tensor for name, tensor in self.head.blocks.state_dict().items()
        }
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.draft_vocab_size,
            "truncated_vocab_size": spec.draft_vocab_size,
            "num_heads": spec.num_heads,
            "num_hidden_layers": spec.num_layers,
            "original_lm_head": True,
            "medusa_fc_bias": spec.has_bias,
        }
        save_head(folder, tensors, config, made_for)


class ExitLearner(FixedOutputLearner):
    """It reads the rows behind one of the target's layers.  Behind right drafts these are those of
    the text, so that one depth is all there is to learn; chains of more are measured."""

    def __init__(
        self,
        network: PreTrainedModel,
        head: ExitHead,
        target_ids: torch.Tensor,
        column: int,
        depth: int = 1,
    ) -> None:
        super().__init__(network, head, target_ids, column, depth)
        self._norm = _final_norm(network)

    def drafts(self, batch: HeadBatch, first: int) -> list[torch.Tensor]:
        """See `Learner`."""
        with torch.no_grad():
            rows = self._norm(self.rows(batch)[:, first + 1 :])
        found = self.head(rows)
        return [found[:, ahead:] for ahead in range(self.depth)]

    def save(self, folder: Path, made_for: MadeFor) -> None:
        """See `Learner`: there is no public format; ours is that of `cluster.draft.heads.exit`."""
        config = {
            "architectures": [ARCHITECTURE],
            "exit_layer": self.head.exit_layer,
            "hidden_size": self._size,
            "vocab_size": self._vocab_size,
        }
        save_head(folder, self.head.state_dict(), config, made_for)


def new_heads(network: PreTrainedModel, num_heads: int, num_layers: int = 1) -> MedusaHead:
    """Heads that begin as the identity: each says what the target says of the next token."""
    output = network.get_output_embeddings().weight.detach()
    spec = MedusaSpec(
        num_heads, num_layers, output.shape[1], len(output), has_bias=True, uses_target_head=True
    )
    head = MedusaHead(spec, output)
    with torch.no_grad():
        for parameter in head.blocks.parameters():
            parameter.zero_()
    return head.train()


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
