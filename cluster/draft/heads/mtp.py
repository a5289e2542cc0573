"""The multi-token-prediction layer in a target's own checkpoint: one more decoder layer, which says
what follows the next token (DeepSeek-AI 2024).

A row at position t takes the embedding of token t + 1 and the target's row of position t behind its
final norm; for drafted tokens its own output stands in for that row, as in EAGLE.  The decoder
layer itself is transformers' of the target's architecture.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cluster.draft.heads.checkpoint import (
    TargetShape,
    TargetWeight,
    Tensors,
    check_size,
    refused,
)
from cluster.draft.heads.layers import HeadModule, KeysValues, Noting
from cluster.engine.attention import seam


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family of checkpoints stores the layer.

    prefix: of its tensors; {} is the target's number of layers.  names: of what is not the decoder
    layer, by our name.  block: the decoder layer's, behind the prefix.
    skips_first_embedding: the row at position 0 takes no embedding.
    hands_on_normed: the row handed on to the next draft is normalised.
    """

    prefix: str
    names: Mapping[str, str]
    block: str
    skips_first_embedding: bool
    hands_on_normed: bool

    @property
    def mark(self) -> str:
        """The tensor by which it is recognised."""
        return f"{self.prefix}{self.names['joint.weight']}"


# DeepSeek-V3, GLM-4.5 and later: a layer behind the last.
_NEXTN = Layout(
    "model.layers.{}.",
    {
        "embedding_norm.weight": "enorm.weight", "hidden_norm.weight": "hnorm.weight",
        "joint.weight": "eh_proj.weight", "norm.weight": "shared_head.norm.weight",
        "lm_head.weight": "shared_head.head.weight", "embed_tokens.weight": "embed_tokens.weight",
    },
    "", skips_first_embedding=True, hands_on_normed=False,
)  # fmt: skip
# Qwen3-Next and Qwen3.5: apart from the layers; the embedding and the output are the target's.
_MTP = Layout(
    "mtp.",
    {
        "embedding_norm.weight": "pre_fc_norm_embedding.weight",
        "hidden_norm.weight": "pre_fc_norm_hidden.weight",
        "joint.weight": "fc.weight", "norm.weight": "norm.weight",
    },
    "layers.0.", skips_first_embedding=False, hands_on_normed=True,
)  # fmt: skip
LAYOUTS = (_NEXTN, _MTP)


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """layer: the target's text configuration, with this as its only layer.  taps: what it takes."""

    layer: Any
    layout: Layout
    taps: tuple[int, ...] = (-1,)

    @property
    def target_hidden_size(self) -> int:
        return int(self.layer.hidden_size)


class MtpHead(HeadModule):
    """The layer's weights and its forward; it writes the target's whole vocabulary."""

    num_layers = 1

    def __init__(self, spec: MtpSpec, embedding: torch.Tensor, output: torch.Tensor) -> None:
        super().__init__()
        from transformers import AutoModel

        seam.register()
        self.spec = spec
        config = spec.layer
        with torch.device("meta"):
            model = AutoModel.from_config(config, attn_implementation=seam.IMPLEMENTATION)
        # Its tables are no weights, so that they have to be computed.
        self.rotary = type(model.rotary_emb)(config)
        self.block = model.layers[0]
        norm, size, eps = type(model.norm), config.hidden_size, config.rms_norm_eps
        self.embedding_norm, self.hidden_norm = norm(size, eps), norm(size, eps)
        self.joint = nn.Linear(2 * size, size, bias=False)
        self.norm = norm(size, eps)
        self.embed_tokens = nn.Embedding(len(embedding), size, _weight=embedding, _freeze=True)
        self.lm_head = nn.Linear(size, len(output), bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(output, requires_grad=False)
        self.register_buffer("token_map", torch.arange(len(output)), persistent=False)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """The target's rows as the layer takes them: they are."""
        return taps

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        plan: seam.LayerPlan,
    ) -> torch.Tensor:
        """See `Eagle3Head.forward`."""
        joint = self._joined(token_ids, hidden, positions)[None]
        rotation = self.rotary(joint, positions[None])
        found: torch.Tensor = self.block(joint, position_embeddings=rotation, plan=plan)
        return found[0]

    def keys_values(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor,
        plan: seam.LayerPlan,
    ) -> list[KeysValues]:  # fmt: skip
        """See `Eagle3Head.keys_values`."""
        block: Any = self.block
        joint, noting = self._joined(token_ids, hidden, positions)[None], Noting()
        block.self_attn(
            hidden_states=block.input_layernorm(joint), attention_mask=None, plan=noting,
            position_embeddings=self.rotary(joint, positions[None]),
        )  # fmt: skip
        return noting.noted

    def _joined(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        embedded = self.embed_tokens(token_ids)
        if self.spec.layout.skips_first_embedding:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        joint: torch.Tensor = self.joint(both)
        return joint

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] as `forward` returned it -> [rows, vocab]."""
        found: torch.Tensor = self.lm_head(self.norm(hidden))
        return found

    def handed_on(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Eagle3Head.handed_on`."""
        if not self.spec.layout.hands_on_normed:
            return hidden
        found: torch.Tensor = self.norm(hidden)
        return found


def layer_of(folder: Path) -> Any:
    """The target's text configuration, with one layer of full attention."""
    from transformers import AutoConfig

    config = copy.deepcopy(AutoConfig.from_pretrained(folder).get_text_config())
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    if not getattr(config, "head_dim", None):
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def load(folder: Path, target: TargetShape, weight: TargetWeight) -> MtpHead:
    """The layer of a checkpoint.  weight: the target's, for the embedding and the output layer.

    Raises ConfigError where the checkpoint has none, or one that does not fit the target.
    """
    config = layer_of(folder)
    check_size(folder, "hidden_size", config.hidden_size, target.hidden_size)
    check_size(folder, "vocab_size", config.vocab_size, target.vocab_size)
    layout, tensors = _stored(folder, target.num_layers)
    has_experts = any(name.startswith("block.mlp.experts.") for name in tensors.held)
    # Which layers have experts is told by their numbers, and this one's is another now.
    config.first_k_dense_replace = 0 if has_experts else 1
    config.mlp_only_layers = [] if has_experts else [0]
    config.decoder_sparse_step = 1
    shape, kept = (target.vocab_size, target.hidden_size), ("embed_tokens.weight", "lm_head.weight")
    weights = (
        tensors.take_or_share(name, shape, weight, shared)
        for name, shared in zip(kept, ("embedding", "output"), strict=True)
    )
    head = MtpHead(MtpSpec(config, layout), *weights)
    for name in head.state_dict():
        _join_experts(tensors, name)
    tensors.fill(head, {}, kept, assign=True)
    return head.requires_grad_(False).eval()


def _stored(folder: Path, num_layers: int) -> tuple[Layout, Tensors]:
    """How the layer is stored, and its tensors by our names."""
    from safetensors import safe_open

    for layout in LAYOUTS:
        prefix = layout.prefix.format(num_layers)
        ours = {theirs: own for own, theirs in layout.names.items()}
        held: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - the file is no mapping
                    if key.startswith(prefix):
                        rest = key.removeprefix(prefix)
                        own = f"block.{rest.removeprefix(layout.block)}"
                        held[ours.get(rest, own)] = file.get_tensor(key)
        if "joint.weight" in held:
            return layout, Tensors(folder, held)
    marks = " or ".join(layout.mark.format(num_layers) for layout in LAYOUTS)
    raise refused(folder, f"it has no multi-token-prediction layer (a tensor {marks})")


def _join_experts(tensors: Tensors, name: str) -> None:
    """Put experts that are stored one by one together, as transformers holds them."""
    base, dot, last = name.rpartition(".experts.")
    if not dot or name in tensors.held:
        return
    parts: Sequence[str] = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    experts: list[torch.Tensor] = []
    while True:
        names = [f"{base}.experts.{len(experts)}.{part}.weight" for part in parts]
        if not all(each in tensors.held for each in names):
            break
        experts.append(torch.cat([tensors.held.pop(each) for each in names]))
    if experts:
        tensors.held[name] = torch.stack(experts)
