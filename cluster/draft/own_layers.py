"""Self-speculation: some of the target's own layers draft for all of them.

Early exit takes the first layers (Elhoushi et al., "LayerSkip", 2024).  Their keys and values of a
text are the target's, whose pages it drafts on; no row of the text is computed twice.  Layer
skipping leaves out a chosen set (Zhang et al., "Draft & Verify", 2023).  Behind the first layer
that is skipped, rows are others than the target's, and so are keys and values: it keeps a small
cache of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.core import Proposal
from cluster.draft.base import DrafterContext, DraftTask
from cluster.draft.draft_model import DraftModel
from cluster.draft.heads.load import head_target, load_draft_head
from cluster.draft.inside import host_of
from cluster.draft.lm import LMDrafter
from cluster.draft.lm_request import LMRequest
from cluster.draft.options import EarlyExitOptions, LayerSkipOptions, LMOptions, OwnLayersOptions
from cluster.engine.engine import Engine
from cluster.engine.first_layers import FirstLayers
from cluster.errors import ConfigError
from cluster.models.made_for import MadeFor, folder_made_for
from cluster.models.resolve import resolve_head


class OwnLayersDrafter(LMDrafter):
    """Grows trees as the draft model of `lm` does, on an engine around some of the target's
    layers."""

    def __init__(
        self,
        context: DrafterContext,
        options: OwnLayersOptions,
        engine: Engine | FirstLayers,
        made_for: MadeFor,
    ) -> None:
        growth = LMOptions(
            engine=engine.config, width=options.width, min_survival=options.min_survival
        )
        whole = engine.tokenizer_hash, engine.num_columns
        super().__init__(context, growth, DraftModel(engine, made_for, None, *whole))


class LayerSkipDrafter(OwnLayersDrafter):
    """The target without some of its layers."""

    def __init__(self, context: DrafterContext, options: LayerSkipOptions) -> None:
        host = host_of(context, "layer_skip")
        with ConfigError.below(f"drafters.{context.name}.options"):
            layers = options.layers(host.num_layers)
        engine = host.part(layers, options.num_pages, options.memory_fraction)
        super().__init__(context, options, engine, options.made_for)


class EarlyExitDrafter(OwnLayersDrafter):
    """The first layers of the target, with its final norm and output layer.

    A tree stands on rows that the target's next step writes over: each begins anew."""

    def __init__(self, context: DrafterContext, options: EarlyExitOptions) -> None:
        host = host_of(context, "early_exit")
        output, made_for = None, MadeFor()
        path = f"drafters.{context.name}.options"
        if options.model:
            folder = resolve_head(options.model)
            head = load_draft_head(folder, head_target(host), "early_exit")
            if options.exit_layer not in (0, head.exit_layer):
                raise ConfigError.at(
                    f"{path}.exit_layer",
                    f"{options.exit_layer} is not the {head.exit_layer} that {options.model} was "
                    "trained behind; leave it out",
                )
            options = replace(options, exit_layer=head.exit_layer)
            output, made_for = head.output(host.weight("output")), folder_made_for(folder)
        with ConfigError.below(path):
            num_layers = len(options.layers(host.num_layers))
        self._first_layers = host.first_layers(num_layers, output)
        super().__init__(context, options, self._first_layers, made_for)

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
        if request.tree is not None:
            if request.root_len == len(request.text):
                return
            self._learn(request)
        request.forget_cache(max(len(request.text) - 1, 0))
