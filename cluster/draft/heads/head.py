"""What draft heads have in common: decoder layers between an embedding and an output layer.

The layers are transformers' on the engine's seam: a forward is given a `LayerPlan`, as the target's
is, and what a layer attends to is the plan's affair (`cluster.draft.head_cache`).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig

from cluster.draft.heads.checkpoint import Tensors
from cluster.engine.attention import seam
from cluster.engine.types import AttentionOptions
from cluster.records import frozen

Config = TypeVar("Config", bound=PreTrainedConfig)

# Of rows: [rows, kv heads, dim] each.
KeysValues = tuple[torch.Tensor, torch.Tensor]
# Cosines and sines, [1, rows, dim] each.
Rotation = tuple[torch.Tensor, torch.Tensor]


def planned(config: Config) -> Config:
    """A configuration for layers that attend by the plan of their forward."""
    seam.register()
    own = copy.copy(config)
    own._attn_implementation = seam.IMPLEMENTATION
    return own


class Noting:
    """A `LayerPlan` that notes the keys and values that pass by, in the order of the layers."""

    def __init__(self, plan: seam.LayerPlan | None = None) -> None:
        """plan: attends; None: nothing is attended to, and the layer's output is of no use."""
        self.noted: list[KeysValues] = []
        self._plan = plan

    def attend_layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `LayerPlan`."""
        self.noted.append((key[0].transpose(0, 1), value[0].transpose(0, 1)))
        if self._plan is None:
            return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        return self._plan.attend_layer(layer, query, key, value, options)


def keys_values(attention: Any, rows: torch.Tensor, rotation: Rotation) -> KeysValues:
    """The keys and values that a layer's attention makes of rows, [1, rows, size], without
    attending."""
    noting = Noting()
    attention(hidden_states=rows, position_embeddings=rotation, attention_mask=None, plan=noting)
    return noting.noted[0]


@frozen
class Sight:
    """The reach of a layer's rows.

    window: a key is visible iff query position - key position < window; None = no limit.
    is_causal: a block's rows do not see those behind them.
    """

    window: int | None = None
    is_causal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A checkpoint's description of its head.

    layers: sizes, norms and rotary embedding of its decoder layers.  taps: the hidden rows it
    takes; tap i is transformers' hidden_states[i], the input of layer i, and -1 what comes after
    the final norm.  norms_output: the row handed on to the next draft is normalised.
    mask_token_id: of heads that draft several tokens in a pass, what stands for those to come.
    """

    layers: Any
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...] = (-1,)
    norms_output: bool = False
    mask_token_id: int = -1


class Head(nn.Module, ABC):
    """A head's weights and its forward.

    embedding: [vocab, hidden], output: [draft_vocab, hidden], the target's own where the file has
    none; an output of None is an output layer of its own.
    takes_before: a row takes the hidden row of the token before it, and not its own token's.
    shares_output: a folder may leave the output layer to the target.
    token_map: int64[draft_vocab], the target's id of each output.
    """

    takes_before = shares_output = True
    token_map: torch.Tensor

    def __init__(
        self,
        spec: HeadSpec,
        embedding: torch.Tensor,
        output: torch.Tensor | None,
        layers: Iterable[nn.Module],
        rotary: nn.Module,
        norm: nn.Module,
    ) -> None:
        super().__init__()
        self.spec = spec
        hidden, size = embedding.shape[1], spec.draft_vocab_size
        self.embed_tokens = nn.Embedding(len(embedding), hidden, _weight=embedding, _freeze=True)
        self.layers, self.rotary, self.norm = nn.ModuleList(layers), rotary, norm
        self.lm_head = nn.Linear(
            hidden, size, bias=False, device=None if output is None else "meta"
        )
        if output is not None:
            self.lm_head.weight = nn.Parameter(output, requires_grad=False)
        self.register_buffer("token_map", torch.arange(size))

    @property
    def sights(self) -> Sequence[Sight]:
        """Of each layer, in passes of `block`."""
        return [Sight(is_causal=True)] * len(self.layers)

    @classmethod
    def filled(cls, spec: Any, tensors: Tensors) -> Self:
        """A head with the tensors of its folder, of which the target's embedding and, where it
        `shares_output`, its output layer stand in for missing ones."""
        ids, hidden = tensors.token_map(spec.draft_vocab_size), spec.layers.hidden_size
        shared = [("embed_tokens.weight", torch.arange(tensors.target.vocab_size), "embedding")]
        if cls.shares_output:
            shared.append(("lm_head.weight", ids, "output"))
        weights: dict[str, Any] = {
            name: tensors.take_or_share(name, rows, hidden, theirs) for name, rows, theirs in shared
        }
        with tensors.target.device:
            head = cls(spec, *weights.values())
        tensors.fill(head, {"token_map": ids}, weights)
        return head.eval()

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """The target's rows as the head takes them: [rows, taps * target hidden] -> [rows, hidden].

        taps: in the order of `spec.taps`.
        """
        return taps

    @abstractmethod
    def entered(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """What the first layer takes, [rows, size]; the arguments are those of `forward`."""

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        plan: seam.LayerPlan,
    ) -> torch.Tensor:
        """One row each: int64[rows] and [rows, hidden] -> the rows' outputs, [rows, hidden].

        hidden: fused taps, or `handed_on` of the row before.  positions: int64[rows] for the rotary
        embedding.  plan: what the rows attend to.
        """
        return self._through(self.layers, *self._started(token_ids, hidden, positions), plan)[0]

    def keys_values(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        plan: seam.LayerPlan,
    ) -> list[KeysValues]:
        """The keys and values that rows behind these attend to, of each layer.

        The arguments are those of `forward`.  plan: is asked for all layers but the last, whose
        rows are not computed."""
        rows, rotation = self._started(token_ids, hidden, positions)
        noting = Noting(plan)
        rows = self._through(self.layers[:-1], rows, rotation, noting)
        last: Any = self.layers[-1]
        attended = getattr(last, "side_by_side", last.input_layernorm)(rows)
        return [*noting.noted, keys_values(last.self_attn, attended, rotation)]

    def block(
        self,
        last_token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        size: int,
        plan: seam.LayerPlan,
    ) -> torch.Tensor:
        """One pass behind each of several texts, `size` rows of each: its last token, which stands
        at `positions`, int64[texts], and masks.  hidden: [texts, hidden], what the first rows take.

        Returns the rows that draft, normalised: [texts, drafts, hidden].
        """
        count = len(last_token_ids)
        ids = last_token_ids.new_full((count, size), self.spec.mask_token_id)
        ids[:, 0] = last_token_ids
        places = positions[:, None] + torch.arange(size, device=positions.device)
        rows = self._masked(hidden, size)
        found: torch.Tensor = self(ids.flatten(), rows.flatten(0, 1), places.flatten(), plan)
        normed: torch.Tensor = self.norm(found)
        return normed.view(count, size, -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] as `forward` returned it -> [rows, draft_vocab]."""
        return self.lm_head(self.norm(hidden))

    def handed_on(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows that the next drafted ones take in place of the target's."""
        return self.norm(hidden) if self.spec.norms_output else hidden

    def _masked(self, hidden: torch.Tensor, size: int) -> torch.Tensor:
        """The hidden rows of a pass: [texts, size, hidden]."""
        return hidden[:, None].expand(-1, size, -1)

    def _started(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Rotation]:
        rows = self.entered(token_ids, hidden, positions)[None]
        # Of time, height and width, which are one in a text; transformers knows that since 5.20.
        axes = 3 if hasattr(self.rotary, "mrope_section") else 1
        return rows, self.rotary(rows, positions.expand(axes, 1, -1).squeeze(0))

    def _through(
        self,
        layers: Iterable[nn.Module],
        rows: torch.Tensor,
        rotation: Rotation,
        plan: seam.LayerPlan,
    ) -> torch.Tensor:
        for layer in layers:
            rows = layer(rows, position_embeddings=rotation, plan=plan)
        return rows
