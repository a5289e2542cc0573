"""DFlash and DSpark: a few layers that fill in a block of tokens at once (Chen et al. 2026).

The block's first row is the last known token, all others are a mask token.  In every layer they
attend to the target's hidden rows of the text, fused and multiplied by that layer's key and value
weights, and to each other.  A row's output says which token stands in its place (DFlash) or behind
it (DSpark).  The context's keys and values depend on one position each: they can be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from cluster.draft.heads.markov import ConfidenceHead, MarkovHead, MarkovSpec
from cluster.draft.heads.precision import PreciseBuffers


@dataclass(frozen=True, slots=True)
class Sight:
    """What a layer's rows see.

    window: a key is visible iff query position - key position < window; None = no limit.
    is_causal: a block's rows do not see those behind them.
    """

    window: int | None = None
    is_causal: bool = False


# attend(layer, query [rows, heads, dim], key, value [rows, kv heads, dim]) -> [rows, heads, dim]:
# over the context, wherever that is kept, and over each block's own rows.
AttendBlock = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """What a folder says of its drafter.

    layers: sizes, norms and rotary embedding.  sights: of each layer.
    taps: the hidden rows it takes; tap i is transformers' hidden_states[i], the input of layer i.
    predicts_next: a row drafts the token behind it; else the one in its place, the first row none.
    markov, has_confidence, confidence_sees_token: DSpark's heads, as far as it has them.
    """

    layers: Qwen3Config
    sights: tuple[Sight, ...]
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    predicts_next: bool
    markov: MarkovSpec | None = None
    has_confidence: bool = False
    confidence_sees_token: bool = False

    @property
    def num_drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size if self.predicts_next else self.block_size - 1


class BlockHead(PreciseBuffers):
    """The drafter's weights and its forward.

    token_map: int64[draft_vocab], target ids of its outputs.  embedding: [vocab, hidden], output:
    [draft_vocab, hidden], the target's own where the file has none.
    """

    token_map: torch.Tensor

    def __init__(self, spec: BlockSpec, embedding: torch.Tensor, output: torch.Tensor) -> None:
        super().__init__()
        self.spec = spec
        config = spec.layers
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(len(embedding), hidden, _weight=embedding, _freeze=True)
        self.fc = nn.Linear(len(spec.taps) * spec.target_hidden_size, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in spec.sights)
        self.rotary = Qwen3RotaryEmbedding(config)
        self.norm = Qwen3RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, spec.draft_vocab_size, bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(output, requires_grad=False)
        self.markov_head = (
            MarkovHead(spec.markov, hidden, len(embedding), spec.draft_vocab_size)
            if spec.markov
            else None
        )
        rank = spec.markov.rank if spec.markov and spec.confidence_sees_token else 0
        self.confidence_head = ConfidenceHead(hidden, rank) if spec.has_confidence else None
        self.register_buffer("token_map", torch.arange(spec.draft_vocab_size))

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """The target's rows as the layers take them: [rows, taps * target hidden] -> [rows,
        hidden].  taps: in the order of `spec.taps`."""
        fused: torch.Tensor = self.hidden_norm(self.fc(taps))
        return fused

    def keys_values(
        self, fused: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What blocks behind these rows attend to, of every layer: [rows, kv heads, dim] each."""
        cos, sin = self.rotary(fused, positions[None])
        return [layer.keys_values(fused, cos, sin) for layer in self._in_order()]

    def _in_order(self) -> Iterator[_Layer]:
        return cast("Iterator[_Layer]", iter(self.layers))

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: AttendBlock
    ) -> torch.Tensor:
        """One block each behind the texts' last tokens, which stand at `positions`, int64[blocks].

        Returns the rows that draft, in the order of the drafts: [blocks, num_drafts, hidden].
        """
        size, num_blocks = self.spec.block_size, len(token_ids)
        ids = token_ids.new_full((num_blocks, size), self.spec.mask_token_id)
        ids[:, 0] = token_ids
        places = positions[:, None] + torch.arange(size, device=positions.device)
        hidden = self.embed_tokens(ids.flatten())
        cos, sin = self.rotary(hidden, places.flatten()[None])
        for index, layer in enumerate(self._in_order()):
            hidden = layer(index, hidden, cos, sin, attend)
        rows: torch.Tensor = self.norm(hidden).view(num_blocks, size, -1)
        return rows[:, size - self.spec.num_drafts :]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] as `forward` returned it -> [..., draft_vocab], without the Markov head."""
        found: torch.Tensor = self.lm_head(hidden)
        return found

    def reorder(self, order: torch.Tensor) -> None:
        """Let output i be what output order[i] was."""
        outputs = [self.lm_head, *([self.markov_head.markov_w2] if self.markov_head else [])]
        for each in outputs:
            each.weight = nn.Parameter(each.weight[order], requires_grad=False)
        self.token_map = self.token_map[order]


class _Layer(nn.Module):
    """A decoder layer of Qwen3, whose keys and values of the context come from elsewhere."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        hidden, eps, dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        assert kv_heads is not None
        has_bias = config.attention_bias
        self._dim = dim
        self.input_layernorm = Qwen3RMSNorm(hidden, eps)
        self.post_attention_layernorm = Qwen3RMSNorm(hidden, eps)
        self.q_proj = nn.Linear(hidden, heads * dim, bias=has_bias)
        self.k_proj = nn.Linear(hidden, kv_heads * dim, bias=has_bias)
        self.v_proj = nn.Linear(hidden, kv_heads * dim, bias=has_bias)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=has_bias)
        self.q_norm = Qwen3RMSNorm(dim, eps)
        self.k_norm = Qwen3RMSNorm(dim, eps)
        self.mlp = Qwen3MLP(config)

    def keys_values(
        self, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = self.k_norm(self.k_proj(rows).view(len(rows), -1, self._dim))
        key = apply_rotary_pos_emb(key[None], key[None], cos, sin, unsqueeze_dim=2)[1][0]
        return key, self.v_proj(rows).view(len(rows), -1, self._dim)

    def forward(
        self, index: int, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
        attend: AttendBlock,
    ) -> torch.Tensor:  # fmt: skip
        normed = self.input_layernorm(hidden)
        query = self.q_norm(self.q_proj(normed).view(len(normed), -1, self._dim))
        query = apply_rotary_pos_emb(query[None], query[None], cos, sin, unsqueeze_dim=2)[0][0]
        attended = attend(index, query, *self.keys_values(normed, cos, sin))
        hidden = hidden + self.o_proj(attended.reshape(len(hidden), -1))
        found: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return found
