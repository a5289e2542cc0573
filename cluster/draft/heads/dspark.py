"""DSpark's heads beside the layers of a DFlash drafter: what a block's rows cannot know of each
other's drafts, and how sure each row may be."""

from __future__ import annotations

import torch
from torch import nn

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
