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

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from cluster.draft.heads.layers import HeadModule, KeysValues, keys_values, planned
from cluster.engine.attention.seam import LayerPlan

# vanilla: of the token before alone.  gated: the row says how much of it counts.  rnn: of all
# tokens before.
MARKOV_KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Sight:
    """The reach of a layer's rows.

    window: a key is visible iff query position - key position < window; None = no limit.
    is_causal: a block's rows do not see those behind them.
    """

    window: int | None = None
    is_causal: bool = False


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """A folder's description of its drafter.

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


class BlockHead(HeadModule):
    """The drafter's weights and its forward.

    embedding: [vocab, hidden], output: [draft_vocab, hidden], the target's own where the file has
    none.
    """

    def __init__(self, spec: BlockSpec, embedding: torch.Tensor, output: torch.Tensor) -> None:
        super().__init__()
        self.spec = spec
        config = spec.layers
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(len(embedding), hidden, _weight=embedding, _freeze=True)
        self.fc = nn.Linear(len(spec.taps) * spec.target_hidden_size, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(planned(config), index) for index in range(len(spec.sights))
        )
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

    def keys_values(self, fused: torch.Tensor, positions: torch.Tensor) -> list[KeysValues]:
        """The keys and values that blocks behind these rows attend to, of every layer."""
        rotation = self.rotary(fused, positions[None])
        return [keys_values(layer.self_attn, fused, rotation) for layer in self.layers]

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plan: LayerPlan
    ) -> torch.Tensor:
        """One block each behind the texts' last tokens, which stand at `positions`, int64[blocks].

        plan: of all blocks' rows, over the context and each block's own.  Returns the rows that
        draft, in the order of the drafts: [blocks, num_drafts, hidden].
        """
        size, num_blocks = self.spec.block_size, len(token_ids)
        ids = token_ids.new_full((num_blocks, size), self.spec.mask_token_id)
        ids[:, 0] = token_ids
        places = positions[:, None] + torch.arange(size, device=positions.device)
        hidden = self.embed_tokens(ids.flatten())[None]
        rotation = self.rotary(hidden, places.flatten()[None])
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotation, plan=plan)
        rows: torch.Tensor = self.norm(hidden[0]).view(num_blocks, size, -1)
        return rows[:, size - self.spec.num_drafts :]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] as `forward` returned it -> [..., draft_vocab], without the Markov head."""
        found: torch.Tensor = self.lm_head(hidden)
        return found

    @property
    def outputs(self) -> Sequence[nn.Linear]:
        """The layers that have an output for each token it writes."""
        markov = () if self.markov_head is None else (self.markov_head.markov_w2,)
        return (self.lm_head, *markov)
