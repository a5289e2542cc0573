"""The first layers of an engine as an engine of their own, on its pages.

What these layers make of a text is what the whole model keeps of it: nothing is computed or held
twice.  The rows of drafts, and that of the text's last token, lie behind the text in the request's
own pages, where the whole's next step writes the rows that it verifies.  So they last until then,
and every tree begins anew at the end of the text.  The layers are taken out by `part_of`, as any
others can be that are to be a model of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Indices
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cluster.core import EMPTY_TREE, TokenTree, token_array
from cluster.engine.cpu.growth import TreeGrower
from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.engine.engine import Engine
from cluster.engine.loading.model import LoadedModel
from cluster.engine.memory.sequence import Sequence, starts_with
from cluster.engine.module_forward import decoder_layers
from cluster.engine.schedule.batch import Pick
from cluster.engine.work import Output, Work
from cluster.errors import ConfigError
from cluster.models.experts import linear_of


class _Continued(Sequence):
    """A request of the whole engine, with the rows that only the first layers have of it.

    length: tokens of the text that they have a row of."""

    length: int = 0

    @property
    def cached_len(self) -> int:
        return self.length


class FirstLayers:
    """See `Engine`, of which this is what a drafter needs.  Belongs to the same thread.

    Its requests are those of the whole engine; one is worked on once `prepare` has returned True.
    """

    def __init__(self, whole: Engine, model: LoadedModel) -> None:
        """model: of the whole's first layers, see `part_of`."""
        self.config = whole.config
        self.vocab_size = self.num_columns = whole.vocab_size
        self.max_context_len = whole.max_context_len
        self.longest_context = whole.longest_context
        self.tokenizer_hash = whole.tokenizer_hash
        self.cache = whole.cache.first(len(model.layers))
        self._pages = whole.page_owners
        self._forward = whole.forward.of_part(model, self.cache)
        self._sequences: dict[str, _Continued] = {}
        self._pending: dict[str, Work] = {}
        self._warm_up()
        self._forward.use_graphs(None, lambda: None)
        self.grower: TreeGrower | None = None
        if model.native is not None and model.native.grows_on(self.cache):
            self.grower = TreeGrower(model.native, self.cache, self.max_context_len, self)

    def _warm_up(self) -> None:
        """Run a row that nobody reads, which also shows whether steps run natively."""
        nobody = _Continued("", 0, self.cache.page_size, len(self.cache.groups))
        for table, page in zip(nobody.tables, self.cache.num_pages, strict=True):
            table.add(page)
        self._forward([Pick(nobody, Work("", 0, token_array([0])), 1, completes=True)])

    # Its rows lie in pages that the whole counts.
    pages_in_use = 0
    pages_total = 0

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def prepare(self, request_id: str, text_len: int, num_nodes: int) -> bool:
        """Make room for so many nodes; True if the whole holds the text but for its last token."""
        held = self._pages.sequences.get(request_id)
        # Where the whole has nodes of its own behind the text, they must not be written over.
        if held is None or held.cached_len != text_len - 1 or len(held.tree):
            return False
        if not self._pages.has_room(held, text_len + num_nodes):
            return False
        self._pages.reserve(held, text_len + num_nodes)
        return True

    def cached_len(self, request_id: str) -> int:
        """See `Engine.cached_len`."""
        found = self._sequences.get(request_id)
        return 0 if found is None else found.length

    def submit(self, work: Work) -> None:
        """Queue one work: the text's last token, or nodes behind it."""
        self._pending[work.request_id] = work

    def step(self) -> list[Output]:
        """One forward over all works."""
        outputs: list[Output] = []
        picks: list[Pick] = []
        for work in self._pending.values():
            sequence = self.opened(work)
            if isinstance(sequence, Output):
                outputs.append(sequence)
            else:
                num_delta = work.context_len - sequence.length
                picks.append(Pick(sequence, work, num_delta, completes=True))
        logits, row = self._forward(picks).logits, 0
        self._pending.clear()  # only now: where it raises, each is tried again or released
        for pick in picks:
            self.written(pick.sequence, pick.work, pick.work.tree)
            outputs.append(Output(pick.work.request_id, logits[row : row + pick.num_logit_rows]))
            row += pick.num_logit_rows
        return outputs

    def opened(self, work: Work, max_slots: int = 0) -> _Continued | Output:
        """See `TreeTexts`; room was made before."""
        lost = Output(work.request_id, have_len=0)
        held = self._pages.sequences.get(work.request_id)
        if held is None or held.cached_len != work.context_len - 1:
            return lost
        sequence = self._sequences.get(work.request_id)
        if len(work.delta):
            is_same = held.hash_at(work.base_len) == work.prefix_hash
            if not is_same or not np.array_equal(held.tokens[work.base_len :], work.delta[:-1]):
                return lost
            sequence = _Continued(work.request_id, 0, self.cache.page_size, 0)
            sequence.tables, sequence.length = held.tables, held.cached_len
            self._sequences[work.request_id] = sequence
        if sequence is None or sequence.tables is not held.tables:
            return lost
        # Of the whole, as of now; these layers write none.
        sequence.border, sequence.state = held.border, held.state
        if len(work.delta):
            return sequence
        if sequence.length != work.base_len:
            return lost
        end = work.context_len + len(work.tree)
        has_room = end <= held.num_pages * self.cache.page_size
        return sequence if has_room and starts_with(sequence, work) else lost

    def written(self, sequence: Sequence, work: Work, tree: TokenTree) -> None:
        assert isinstance(sequence, _Continued)
        sequence.length, sequence.tree = work.context_len, tree

    def retain(self, request_id: str, path: Indices[int], keep: Indices[int] = ()) -> None:
        """Nothing is kept beyond a step of the whole."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.tree = EMPTY_TREE

    def release(self, request_id: str) -> None:
        """Forget a request, whose pages are the whole's."""
        self._sequences.pop(request_id, None)
        self._pending.pop(request_id, None)


# Some layers of a loaded model as a model of their own, which shares its weights.
#
# What is copied is the tree of module objects, so that layers can have other indices and another
# configuration; every tensor, packed weights included, is the whole model's.


def part_of(
    model: LoadedModel, layers: Indices[int], output: torch.Tensor | None = None
) -> LoadedModel:
    """The model that consists of the embedding, these layers (ascending), the final norm and the
    output layer of `model`; raises ConfigError where its layers cannot be taken apart.

    output: [vocab, hidden], the output layer's weight in place of the model's."""
    whole = decoder_layers(model.module, len(model.layers))
    if whole is None:
        raise _refusal(model, "they do not stand in one list")
    if any(hasattr(each, "_hf_hook") for each in model.module.modules()):
        raise _refusal(model, "a device map spreads them over devices")
    if any(each.shared_with is not None for each in model.layers):
        raise _refusal(model, "some read the keys and values of others")
    config = _config_of(model.module.config, layers)
    module = _copy(model.module, model.module.config, config)
    kept = []
    for place, index in enumerate(layers):
        layer = _copy(whole[index], model.module.config, config)
        for each in layer.modules():
            if isinstance(getattr(each, "layer_idx", None), int):
                each.layer_idx = place
        kept.append(layer)
    where = next(name for name, each in model.module.named_modules() if each is whole)
    module.set_submodule(where, torch.nn.ModuleList(kept))
    if output is not None:
        module.set_output_embeddings(_output_like(module.get_output_embeddings(), output))
    return replace(
        model,
        module=module,
        layers=tuple(model.layers[index] for index in layers),
        native=None if model.native is None else model.native.of_part(module, layers),
        fused=None if model.fused is None else model.fused.of_part(module, layers),
    )


def _output_like(former: Any, weight: torch.Tensor) -> torch.nn.Module:
    """A layer of that weight, and the former one's bias, which computes as the former one does."""
    layer = linear_of(weight.to(former.weight.dtype), former.bias)
    return PackedLinear(layer, former.native) if isinstance(former, PackedLinear) else layer


def _copy(module: Any, old_config: Any, config: Any) -> Any:
    """The same module, and those in it, as other objects around the same tensors."""
    copied = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):  # of parameters, buffers, hooks
            copied.__dict__[name] = value.copy()
    for name, child in module._modules.items():
        if child is not None:
            copied._modules[name] = _copy(child, old_config, config)
    own = copied.__dict__.get("config")
    if own is old_config or own is old_config.get_text_config():
        copied.config = config if own is old_config else config.get_text_config()
    return copied


def _config_of(config: Any, layers: Indices[int]) -> Any:
    """The configuration of these layers alone: models ask it for their number, and for the type of
    each layer."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    count = text.num_hidden_layers
    text.num_hidden_layers = len(layers)
    for name, value in vars(text).copy().items():
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, [value[index] for index in layers])
    return changed


def _refusal(model: LoadedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"{model.architecture}: some of its layers cannot draft for all of them: {reason}; remove "
        "the drafter",
        param="model",
    )
