"""Draft heads as they are trained: EAGLE-3, Medusa and early exits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from cluster.draft.head_cache import Span, SpanAttention, TextRows
from cluster.draft.heads.eagle3 import Eagle3Head, Eagle3Spec
from cluster.draft.heads.exit import ARCHITECTURE, ExitHead
from cluster.draft.heads.medusa import MedusaHead, MedusaSpec
from cluster.errors import ConfigError
from cluster.models.made_for import MadeFor
from cluster.train.chat_heads import HeadBatch, Learner, save_head

# EAGLE-3 as it is trained: chains of its own rows, as deep as it will draft (Li et al. 2025).

# Keys of the target's configuration that its draft layer shares.
_SHARED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "hidden_act",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


_NOT_SAVED = ("embed_tokens.weight", "token_map")


class Eagle3Learner(Learner):
    """The head that serves, with the attention of training."""

    def __init__(self, head: Eagle3Head, depth: int) -> None:
        """head: its taps are the first ones of the recorded states.  depth: drafts in a chain."""
        super().__init__()
        self.head = head
        self.depth = depth

    def drafts(self, batch: HeadBatch, first: int) -> list[torch.Tensor]:
        """See `Learner`: the training-time test, in which each draft reads the one before it.

        A draft's row sees the first drafts' rows up to its own, then its own later ones."""
        head, width = self.head, batch.token_ids.shape[1] - 1
        states = batch.tapped(slice(len(head.spec.taps)))[0, :width].flatten(1)
        hidden = head.fuse(states.to(head.fc.weight.dtype))
        positions = torch.arange(width, device=states.device)
        layer = head.spec.layers
        span = Span([states.new_empty(0, 2, layer.num_key_value_heads, layer.head_dim)])
        seen = positions[:, None] >= positions
        found: list[torch.Tensor] = []
        for depth in range(self.depth):
            # Rows near the end have no token left to read: what they give is cut away.
            token_ids = batch.token_ids[0, 1:].roll(-depth)
            if depth:  # no loss and no later draft reads the rows before
                token_ids = token_ids[first:]
            attention = SpanAttention([TextRows(span, len(hidden), [seen])])
            output = head(token_ids, hidden, positions + depth, attention)
            if not depth:
                output, positions, seen = output[first:], positions[first:], seen[first:]
            itself = positions[:, None] == positions
            seen = torch.cat((seen, itself), dim=1)
            found.append(output[None, : width - first - depth])
            hidden = head.handed_on(output)
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Learner`."""
        return self.head.logits(hidden)

    def save(self, folder: Path, made_for: MadeFor) -> None:
        """See `Learner`: the authors' format.  The embedding is left out: it is the target's."""
        spec, layer = self.head.spec, self.head.spec.layers
        tensors = {
            name.replace("layers.0.", "midlayer."): tensor
            for name, tensor in self.head.state_dict().items()
            if name not in _NOT_SAVED
        }
        ids = self.head.token_map.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(layer.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        config = {
            **{
                key: value for key, value in layer.to_diff_dict().items() if not key.startswith("_")
            },
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": spec.draft_vocab_size,
            "target_hidden_size": spec.target_hidden_size,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(spec.taps),
                "use_aux_hidden_state": True,
            },
        }
        save_head(folder, tensors, config, made_for)


def new_head(
    network: PreTrainedModel, taps: tuple[int, ...], target_ids: torch.Tensor
) -> Eagle3Head:
    """A head that begins as the target's last layer on its last tap.

    target_ids: int64[draft vocabulary].
    """
    config = network.config
    shared = {name: getattr(config, name, None) for name in _SHARED}
    known = {name: value for name, value in shared.items() if value is not None}
    layer = LlamaConfig(**known, vocab_size=config.vocab_size, num_hidden_layers=1)
    hidden = layer.hidden_size
    spec = Eagle3Spec(
        layers=layer, target_hidden_size=hidden, draft_vocab_size=len(target_ids), taps=taps
    )
    embedding = network.get_input_embeddings().weight.detach()
    head = Eagle3Head(spec, embedding)
    weights = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    prefix = f"model.layers.{config.num_hidden_layers - 1}."
    last = {
        name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)
    }
    last["hidden_norm.weight"] = last["input_layernorm.weight"]
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"self_attn.{part}.weight"
        last[name] = torch.cat([last[name], last[name]], dim=1)
    with torch.no_grad():
        head.token_map.copy_(target_ids)
        head.lm_head.weight.copy_(network.get_output_embeddings().weight[target_ids])
        head.norm.get_parameter("weight").copy_(weights["model.norm.weight"])
        head.fc.weight.zero_()
        head.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
        for name, mine in head.get_submodule("layers.0").named_parameters():
            mine.copy_(last[name])
    return head.train()


# Medusa heads and early exits as they are trained: the target's own output layer reads them.


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
    ) -> None:
        super().__init__(network, head, target_ids, column, depth=1)
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


def new_heads(network: PreTrainedModel, num_heads: int) -> MedusaHead:
    """Heads that begin as the identity: each says what the target says of the next token."""
    output = network.get_output_embeddings().weight.detach()
    spec = MedusaSpec(
        num_heads, 1, output.shape[1], len(output), has_bias=True, uses_target_head=True
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
