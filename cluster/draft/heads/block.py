"""DFlash and DSpark: a few layers that fill in a block of tokens at once (Chen et al. 2026).

The block's first row is the last known token, all others are a mask token.  In every layer they
attend to the target's hidden rows of the text, fused and multiplied by that layer's key and value
weights, and to each other.  A row's output says which token stands in its place (DFlash) or behind
it (DSpark).  The context's keys and values depend on one position each: they can be kept.

A block's rows are computed at once and know nothing of each other's drafts.  DSpark's Markov head
makes up for that: it adds to a row's logits what the token drafted before it makes likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from cluster.draft.heads.head import Head, HeadSpec, KeysValues, Sight, keys_values, planned
from cluster.engine.attention.seam import LayerPlan
from cluster.records import frozen

# vanilla: of the token before alone.  gated: the row says how much of it counts.  rnn: of all
# tokens before.
MARKOV_KINDS = ("vanilla", "gated", "rnn")


@frozen
class MarkovSpec:
    """rank: numbers that a token is known by.  kind: of MARKOV_KINDS."""

    kind: str
    rank: int


class MarkovHead(nn.Module):
    """Goes through a block's rows in their order, of several blocks at once."""

    def __init__(
        self, spec: MarkovSpec, hidden_size: int, vocab_size: int, draft_vocab_size: int
    ) -> None:
        super().__init__()
        self.spec = spec
        self.markov_w1 = nn.Embedding(vocab_size, spec.rank)
        self.markov_w2 = nn.Linear(spec.rank, draft_vocab_size, bias=False)
        if spec.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + spec.rank, spec.rank)
        if spec.kind == "rnn":
            self.joint_proj = nn.Linear(2 * spec.rank + hidden_size, 3 * spec.rank)

    def start(self, num_blocks: int) -> torch.Tensor:
        """The state before the first row: [blocks, rank]."""
        return self.markov_w1.weight.new_zeros(num_blocks, self.spec.rank)

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64[blocks] -> [blocks, rank]."""
        found: torch.Tensor = self.markov_w1(token_ids)
        return found

    def forward(
        self, before: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The addition to a row's logits, [blocks, draft_vocab], and the state behind it.

        before: [blocks, rank], the token before it, `embedded`.  hidden: [blocks, hidden].
        """
        if self.spec.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, before), dim=-1)))
            return self.markov_w2(gate * before), state
        if self.spec.kind == "rnn":
            joint = self.joint_proj(torch.cat((state, before, hidden), dim=-1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1.0 - gate) * torch.tanh(candidate)
            return self.markov_w2(torch.tanh(output)), state
        return self.markov_w2(before), state


class ConfidenceHead(nn.Module):
    """How likely the target takes a row's draft, provided that it took those before."""

    def __init__(self, hidden_size: int, markov_rank: int) -> None:
        """markov_rank: of the token before, which it is shown too; 0 = it is not."""
        super().__init__()
        self.proj = nn.Linear(hidden_size + markov_rank, 1)
        self._sees_token = markov_rank > 0

    def forward(self, hidden: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """[blocks, hidden] and [blocks, rank], `MarkovHead.embedded` -> probabilities, [blocks]."""
        if self._sees_token:
            assert before is not None
            hidden = torch.cat((hidden, before), dim=-1)
        return torch.sigmoid(self.proj(hidden)[:, 0])


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec(HeadSpec):
    """sights: of each layer.
    predicts_next: a row drafts the token behind it; else the one in its place, the first row none.
    markov, has_confidence, confidence_sees_token: DSpark's heads, as far as it has them.
    """

    sights: tuple[Sight, ...]
    block_size: int
    predicts_next: bool
    markov: MarkovSpec | None = None
    has_confidence: bool = False
    confidence_sees_token: bool = False

    @property
    def num_drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size if self.predicts_next else self.block_size - 1


class BlockHead(Head):
    """The target's rows are shown to every layer as keys and values; a block's own rows take
    embeddings alone."""

    spec: BlockSpec
    takes_before = False

    def __init__(self, spec: BlockSpec, embedding: torch.Tensor, output: torch.Tensor) -> None:
        config = planned(spec.layers)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        layers = (Qwen3DecoderLayer(config, index) for index in range(len(spec.sights)))
        rotary, norm = Qwen3RotaryEmbedding(config), Qwen3RMSNorm(hidden, eps)
        super().__init__(spec, embedding, output, layers, rotary, norm)
        self.fc = nn.Linear(len(spec.taps) * spec.target_hidden_size, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps)
        self.markov_head = (
            MarkovHead(spec.markov, hidden, len(embedding), spec.draft_vocab_size)
            if spec.markov
            else None
        )
        rank = spec.markov.rank if spec.markov and spec.confidence_sees_token else 0
        self.confidence_head = ConfidenceHead(hidden, rank) if spec.has_confidence else None

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        fused: torch.Tensor = self.hidden_norm(self.fc(taps))
        return fused

    def entered(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """See `Head`."""
        found: torch.Tensor = self.embed_tokens(token_ids)
        return found

    def keys_values(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        plan: LayerPlan,
    ) -> list[KeysValues]:
        """See `Head`: each depends on its own fused row alone."""
        rotation = self.rotary(hidden, positions[None])
        return [keys_values(layer.self_attn, hidden[None], rotation) for layer in self.layers]

    def block(self, *given: Any) -> torch.Tensor:
        """See `Head`."""
        return super().block(*given)[:, -self.spec.num_drafts :]

    @property
    def sights(self) -> Sequence[Sight]:
        """See `Head`."""
        return self.spec.sights

    @property
    def outputs(self) -> Sequence[nn.Linear]:
        """The layers that have an output for each token it writes."""
        markov = () if self.markov_head is None else (self.markov_head.markov_w2,)
        return (self.lm_head, *markov)
