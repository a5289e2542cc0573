"""What DFlash-2 and DSpark add to DFlash.

DFlash-2 (Z Lab 2026): convolutions over a block's rows, and a selector.  Around the attention and
the MLP of each layer, every row of a block takes up those just before it, with weights that are
learnt in part and said by the row itself in part.  The selector makes a path of the rows' best
tokens: a score of each two neighbours is added to the second one's logit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from cluster.records import frozen


@frozen
class SecondSpec:
    """num_taps: rows that a convolution takes up, its own among them.  group_size: neighbouring
    columns with the same weights from the row itself.  rank: numbers that the selector knows a
    token by.  num_candidates: the best tokens of a row, from which it chooses."""

    num_taps: int
    group_size: int
    rank: int
    num_candidates: int


class Convolution(nn.Module):
    """Two of them, before and behind a part of a layer, both with weights that the first one's rows
    say; no row takes up those of another block."""

    def __init__(self, hidden_size: int, block_size: int, spec: SecondSpec) -> None:
        super().__init__()
        self._spec, self._block_size = spec, block_size
        self.base_kernel = nn.Parameter(torch.empty(2, spec.num_taps, hidden_size))
        size = 2 * spec.num_taps * hidden_size // spec.group_size
        self.kernel_projection = nn.Linear(hidden_size, size, bias=False)

    def forward(
        self, rows: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """`part` between the two.  rows: [1, blocks * block, hidden]."""
        spec = self._spec
        shape = (-1, self._block_size, 2, spec.num_taps, rows.shape[-1] // spec.group_size)
        said = self.kernel_projection(rows).view(shape).repeat_interleave(spec.group_size, dim=-1)
        before, behind = (self.base_kernel + said).unbind(2)  # [blocks, block, taps, hidden] each
        return self._convolved(part(self._convolved(rows, before)), behind)

    def _convolved(self, rows: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        ahead = self._spec.num_taps - 1
        padded = nn.functional.pad(rows.view_as(kernels[:, :, 0]), (0, 0, ahead, 0))
        shifted = [padded[:, ahead - tap :][:, : self._block_size] for tap in range(ahead + 1)]
        return (kernels * torch.stack(shifted, dim=2)).sum(2).view_as(rows)


class ConvolvedLayer(Qwen3DecoderLayer):  # type: ignore[misc]
    """A layer of DFlash between convolutions."""

    def __init__(self, layers: Qwen3Config, index: int, block_size: int, spec: SecondSpec) -> None:
        super().__init__(layers, index)
        self.attention_conv = Convolution(layers.hidden_size, block_size, spec)
        self.mlp_conv = Convolution(layers.hidden_size, block_size, spec)

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        """As a Qwen3's decoder layer."""

        def attend(rows: torch.Tensor) -> torch.Tensor:
            return self.self_attn(hidden_states=rows, attention_mask=None, **given)[0]

        hidden = hidden_states + self.attention_conv(self.input_layernorm(hidden_states), attend)
        return hidden + self.mlp_conv(self.post_attention_layernorm(hidden), self.mlp)


class CandidateSelector(nn.Module):
    """Scores how well each of a row's best tokens follows the token before it."""

    def __init__(self, hidden_size: int, vocab_size: int, spec: SecondSpec) -> None:
        super().__init__()
        self._num_candidates = spec.num_candidates
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, spec.rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, spec.rank))
        self.hidden_projection = nn.Linear(hidden_size, spec.rank, bias=False)

    def forward(
        self,
        logits: torch.Tensor,
        token_map: torch.Tensor,
        hidden: torch.Tensor,
        before: torch.Tensor,
    ) -> torch.Tensor:
        """The logits of one row of each block, -inf but for its best tokens: [blocks, draft_vocab].

        token_map: int64[draft_vocab], the target's id of each column.  hidden: [blocks, hidden].
        before: int64[blocks], the token before it."""
        best, columns = logits.topk(min(self._num_candidates, logits.shape[1]))
        context = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        scores = (self.successor_codebook[token_map[columns]] * context[:, None]).sum(-1)
        return torch.full_like(logits, -torch.inf).scatter(1, columns, best + scores.float())


# DSpark's heads: what a block's rows cannot know of each other's drafts, and how sure each row may
# be.

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
        return self.markov_w1(token_ids)

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
