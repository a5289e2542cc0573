"""Prediction: drafts along the output that the client expects, and finds its place after an edit.

A client that has a file changed knows most of the answer: the file as it was.  The output follows
it, leaves it where something is inserted, deleted or replaced, and comes back to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config.parse import PositiveInt, Share
from cluster.draft.base import DrafterContext
from cluster.draft.count_drafter import CountDrafter, CountState
from cluster.draft.native import lookups as native
from cluster.records import frozen


@frozen
class PredictionOptions:
    """Copies of the output that the client predicts."""

    max_places: PositiveInt = 4
    """Places in the predicted text that are continued at once, where it is unclear at which of them
    the output is."""
    min_survival: Share = 0.02
    """Less likely nodes are left out."""


@dataclass(slots=True, eq=False)
class PredictionState(CountState):
    """source: None for a request without a prediction."""

    source: native.Predicted | None = None


class PredictionDrafter(CountDrafter[PredictionState]):
    """Continues the request's own prediction; drafts nothing for requests without one."""

    def __init__(self, context: DrafterContext, options: PredictionOptions) -> None:
        super().__init__(context, options.min_survival, PredictionState.opened_by)
        self._max_places = options.max_places

    def _forget_tree(self, state: PredictionState) -> None:
        super()._forget_tree(state)
        predicted = state.params.prediction
        state.source = native.Predicted(predicted, self._max_places) if predicted else None

    def _source(self, state: PredictionState) -> native.Predicted | None:
        return state.source
