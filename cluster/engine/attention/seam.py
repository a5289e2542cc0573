"""The seam between transformers' models and our attention.

Models run unmodified: `tree_paged` is registered as an attention implementation, and the forward's
`plan` argument reaches it in every layer.  What happens there is the plan's affair: `AttentionStep`
writes keys and values into the cache and attends by a backend; the probe at load time takes notes.
A backend turns a Batch into an AttentionPlan once per step; `cluster.engine.attention.sdpa` is the
reference that every other one is tested against.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface

from cluster.engine.attention.delta_rule import Piece, delta_rule
from cluster.engine.attention.latent import LatentAttention
from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.schedule.batch import Batch
from cluster.engine.types import AttentionOptions, LayerSpec
from cluster.errors import ConfigError
from cluster.records import record

IMPLEMENTATION = "tree_paged"
# Of a step's layout.
Words = npt.NDArray[np.int32]


class AttentionPlan(Protocol):
    """One step's attention, for all layers."""

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, window: int | None, options: AttentionOptions
    ) -> torch.Tensor:
        """query: [heads, rows, head_dim].  kv: a layer of the cache.  Returns [rows, heads,
        head_dim]: each row attends to the keys of its sequence that the Batch says it sees."""
        ...


class StepForm(Protocol):
    """The part of its steps' attention that a graph fixes.  Equal forms can share one; hashable."""

    def num_words(self, batch: Batch) -> int:
        """The number of words that `lay_out` writes."""
        ...

    def lay_out(self, batch: Batch, out: Words) -> None:
        """Write what the plan reads of this step."""
        ...

    def plan(self, words: torch.Tensor) -> AttentionPlan:
        """A plan that reads `words`, int32 on the device, whenever its kernels run."""
        ...


class AttentionBackend(ABC):
    """A way to compute tree attention over paged keys.

    name: as configurations call it."""

    name: str

    @property
    def failure(self) -> str:
        """Why it leaves layers to the reference that it should serve; "" = it does not."""
        return ""

    @abstractmethod
    def plan(self, batch: Batch, scratch_slot: int) -> AttentionPlan: ...

    def warm_up(self) -> None:
        """Make ready what later steps will need; to be called after a step with every layer."""
        return

    def form(self, num_rows: int, max_rows: int) -> StepForm | None:
        """The form of batches of `num_rows` rows, at most `max_rows` of one sequence.  None where
        the model's layers have none; they are known once a step has run."""
        return None

    def settle(self) -> None:
        """From now on, raise RuntimeError instead of leaving anything to the reference."""
        return


class LayerPlan(Protocol):
    """The receiver of a layer's tensors from `tree_paged`."""

    def attend_layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim], rotated.
        Returns [1, rows, heads, head_dim]."""
        ...


class PathPlan(LayerPlan, Protocol):
    """The same where layers may be convolutions along a row's path, or keep a matrix of it."""

    def convolve_layer(
        self, layer: int, states: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """states [rows, channels], weight [channels, kernel].  Returns [rows, channels]: the sums
        over the last `kernel` tokens of each row's path, its own last, of state times weight."""
        ...

    def delta_layer(self, layer: int, *rows: torch.Tensor) -> torch.Tensor:
        """rows: query, key, value, decay and beta as `delta_rule` takes them."""
        ...


@record
class AttentionStep:
    """The plan of a real step: write, then attend.

    cache: of all layers.  attentions, slots (int64[rows], which rows are written to), path_slots
    (see `Batch`; read of those with a kernel): of each of its groups.  pieces: of the group of
    delta layers.
    """

    cache: KVCache
    layers: Sequence[LayerSpec]
    attentions: Sequence[AttentionPlan]
    slots: Sequence[torch.Tensor]
    path_slots: Sequence[torch.Tensor | None] = ()
    pieces: Sequence[Piece] = ()

    def kv(self, layer: int) -> torch.Tensor:
        """The layer's cache, [slots, 2, kv_heads, head_dim]."""
        return self.cache.layers[layer]

    def window(self, layer: int) -> int | None:
        return self.layers[layer].window

    def attention(self, layer: int) -> AttentionPlan:
        """The attention of the layer's group."""
        return self.attentions[self.cache.group_of[layer]]

    def write_slots(self, layer: int) -> torch.Tensor:
        return self.slots[self.cache.group_of[layer]]

    def attend_layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        kv, slots = self.kv(layer), self.write_slots(layer)
        if self.layers[layer].is_latent:  # what is written of a token is read as both
            kv.index_copy_(0, slots.to(kv.device), key.view(-1, *kv.shape[1:]).to(kv.dtype))
            kv = kv.view(len(kv), 1, 1, -1).expand(-1, 2, -1, -1)
        elif self.layers[layer].shared_with is None:
            fresh = torch.stack((key[0], value[0]), dim=1)  # [kv_heads, 2, rows, head_dim]
            kv.index_copy_(0, slots.to(kv.device), fresh.permute(2, 1, 0, 3).to(kv.dtype))
        attended = self.attention(layer).attend(query[0], kv, self.window(layer), options)
        return attended.unsqueeze(0)

    def convolve_layer(
        self, layer: int, states: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        kept = self.kv(layer).flatten(1)[:, : states.shape[1]]  # [slots, channels]
        kept.index_copy_(0, self.write_slots(layer).to(kept.device), states.to(kept.dtype))
        paths = self.path_slots[self.cache.group_of[layer]]
        assert paths is not None, "a layer's group has the kernel of the layer"
        slots = paths[:, -weight.shape[1] :].to(kept.device)
        read = kept.index_select(0, slots.clamp(min=0).flatten()).view(*slots.shape, -1)
        # torch is slow on operands that are not contiguous, and in masked_fill.
        factors = weight.T.float().contiguous()
        terms = torch.where(slots.unsqueeze(2) < 0, 0.0, read.float()) * factors
        # One after the other, so that a row's bits do not depend on the rows beside it.
        return reduce(torch.add, terms.unbind(1)).to(states.dtype)

    def delta_layer(self, layer: int, *rows: torch.Tensor) -> torch.Tensor:
        convolved = sum(each[0].numel() for each in rows[:3])
        lines, states = self.kv(layer).flatten(1)[:, convolved:], self.cache.states[layer]
        on_device = (each.to(lines.device) for each in rows)
        return delta_rule(lines, states, self.pieces, *on_device)


def tree_paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    plan: LayerPlan | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function transformers calls in every layer; see `LayerPlan` for shapes.

    attention_mask is always None: no mask function is registered under this name.  A layer's
    window was learned at load (`cluster.engine.loading.probe`).
    """
    if plan is None:
        raise ConfigError(
            "it does not pass keyword arguments through to its attention", param="model"
        )
    if scaling is None:
        scaling = float(query.shape[-1]) ** -0.5
    if isinstance(module, LatentAttention):
        query = module.to_latents(query)
    options = AttentionOptions(scaling, softcap, s_aux)
    output = plan.attend_layer(layer_index(module), query, key, value, options)
    if isinstance(module, LatentAttention):
        output = module.to_values(output)
    # Some models view the result instead of reshaping it.
    return output.contiguous(), None


def layer_index(module: torch.nn.Module) -> int:
    """The number of the layer that an attention module belongs to."""
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ConfigError(
            f"{type(module).__name__} does not know its layer index; this architecture cannot be "
            "served",
            param="model",
        )
    return index


def register() -> None:
    """Make `tree_paged` known to transformers; a second call changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, tree_paged)
