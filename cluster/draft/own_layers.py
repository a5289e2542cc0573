"""Self-speculation: some of the target's own layers draft for all of them.

Early exit takes the first layers (Elhoushi et al., "LayerSkip", 2024).  Their keys and values of a
text are the target's, whose pages it drafts on; no row of the text is computed twice.  Layer
skipping leaves out a chosen set (Zhang et al., "Draft & Verify", 2023).  Behind the first layer
that is skipped, rows are others than the target's, and so are keys and values: it keeps a small
cache of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from cluster.core import DraftTask, Proposal
from cluster.draft.base import DrafterContext
from cluster.draft.heads.exit import ExitHead
from cluster.draft.heads.load import load_draft_head, target_shape
from cluster.draft.inside import Host, host_of
from cluster.draft.lm import LMDrafter
from cluster.draft.lm_options import LMOptions
from cluster.draft.lm_request import LMRequest
from cluster.draft.own_layers_options import EarlyExitOptions, LayerSkipOptions
from cluster.draft.tree_request import learn_draws
from cluster.engine.engine import Engine
from cluster.engine.first_layers import FirstLayers
from cluster.errors import ConfigError
from cluster.models.made_for import MadeFor, folder_made_for
from cluster.models.resolve import resolve_head


class OwnLayersDrafter(LMDrafter, ABC):
    """Grows trees as the draft model of `lm` does, on an engine around some of the target's
    layers."""

    kind: ClassVar[str]

    def __init__(
        self, context: DrafterContext, options: EarlyExitOptions | LayerSkipOptions
    ) -> None:
        host = host_of(context.target, context.name, self.kind)
        with ConfigError.below(f"drafters.{context.name}.options"):
            layers = options.layers(host.num_layers)
        engine = self._engine_of(host, layers, options)
        growth = LMOptions(
            engine=engine.config,
            width=options.width,
            min_survival=options.min_survival,
        )
        super().__init__(context, growth, engine)
        self.made_for = MadeFor()

    @abstractmethod
    def _engine_of(self, host: Host, layers: Sequence[int], options: Any) -> Engine | FirstLayers:
        """The engine that runs the layers."""


class EarlyExitDrafter(OwnLayersDrafter):
    """The first layers of the target, with its final norm and output layer.

    A tree stands on rows that the target's next step writes over: each begins anew."""

    kind = "early_exit"

    def __init__(self, context: DrafterContext, options: EarlyExitOptions) -> None:
        self._exit: ExitHead | None = None
        if options.model:
            host = host_of(context.target, context.name, self.kind)
            folder = resolve_head(options.model)
            self._exit = load_draft_head(
                folder, target_shape(host), host.weight, wanted="early_exit"
            )
            if options.exit_layer not in (0, self._exit.exit_layer):
                path = f"drafters.{context.name}.options.exit_layer"
                raise ConfigError.at(
                    path,
                    f"{options.exit_layer} is not the {self._exit.exit_layer} that "
                    f"{options.model} was trained behind; leave it out",
                )
            options = replace(options, exit_layer=self._exit.exit_layer)
        super().__init__(context, options)
        if self._exit is not None:
            self.made_for = folder_made_for(resolve_head(options.model))

    def _engine_of(self, host: Host, layers: Sequence[int], options: Any) -> FirstLayers:
        output = None if self._exit is None else self._exit.output(host.weight("output"))
        self._first_layers = host.first_layers(len(layers), output)
        return self._first_layers

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`.  Left alone are texts that the target does not hold just now."""
        return super().propose([task for task in tasks if self._is_ready(task)])

    def graft(self, trees: Sequence[Proposal]) -> None:
        """See `Grafting`: none, for of rows that last one step nothing can be dropped."""

    def _is_ready(self, task: DraftTask) -> bool:
        request = self._requests.get(task.request_id, task.generation)
        if request is None:
            return False
        # A pass may go beyond the last node that was asked for.
        num_nodes = self._num_expanded(min(task.max_nodes, self._max_nodes)) + self._options.width
        return self._first_layers.prepare(task.request_id, len(request.text), num_nodes)

    def _catch_up(self, request: LMRequest) -> None:
        tree = request.tree
        if tree is not None and request.root_len == len(request.text):
            return
        if tree is not None:
            token_ids = request.text.token_ids[request.root_len :].tolist()
            fits = [self._sharpness_of(request)]
            learn_draws(fits, tree, tree.walk(token_ids), token_ids)
        request.forget_cache(max(len(request.text) - 1, 0))


class LayerSkipDrafter(OwnLayersDrafter):
    """The target without some of its layers."""

    kind = "layer_skip"

    def __init__(self, context: DrafterContext, options: LayerSkipOptions) -> None:
        super().__init__(context, options)
        self.made_for = options.made_for

    def _engine_of(self, host: Host, layers: Sequence[int], options: Any) -> Engine:
        return host.part(layers, options.num_pages, options.memory_fraction)
