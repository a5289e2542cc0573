"""Medusa heads as they are trained: every head reads the target's last hidden row."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from cluster.draft.heads.medusa import MedusaHead, MedusaSpec
from cluster.models.made_for import MadeFor
from cluster.train.chat_heads import HeadBatch, Learner, save_head


class MedusaLearner(Learner):
    """The heads that serve.  Drafts are read by the target's own output layer."""

    _output: torch.Tensor

    def __init__(self, head: MedusaHead, target_ids: torch.Tensor, column: int) -> None:
        """target_ids: int64[n], the tokens among which it learns to choose; a part of them is
        enough to learn from, and quicker.  column: of the final norm's output in the states."""
        super().__init__()
        self.head = head
        self.depth = head.spec.num_heads
        output = head.lm_heads[0].get_parameter("weight").detach()[target_ids]
        self.register_buffer("_output", output, persistent=False)
        self._column = column

    def drafts(self, batch: HeadBatch, first: int) -> list[torch.Tensor]:
        """See `Learner`."""
        rows = batch.tapped(self._column)[:, first:-1].to(self._output.dtype)
        width = rows.shape[1]
        blocks = self.head.blocks.children()
        return [block(rows)[:, : width - depth] for depth, block in enumerate(blocks)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Learner`."""
        return hidden @ self._output.T

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
