"""The steps of texts that ask for `return_draft_trees`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.core import TokenArray
from cluster.messages import StepReport, TextVerdict
from cluster.plan.in_flight import InFlight
from cluster.requests.draft_step import DraftStep


def with_step(
    said: TextVerdict,
    names: Sequence[str],
    in_flight: InFlight,
    path: TokenArray,
    report: StepReport,
) -> TextVerdict:
    """Return a verdict with the step that led to it.

    names: of the text's drafters.  path: all nodes that were accepted; the text may end earlier.
    """
    path = path[: len(said.token_ids)]
    tree = in_flight.tree
    step = DraftStep(
        tuple(names), tree.token_ids, tree.parents, in_flight.survival, in_flight.sources, path,
        said.token_ids[len(path) :], report.draft_time_s, report.step_time_s, report.num_sequences,
        said.why.name.lower() if said.why else "",
    )  # fmt: skip
    return replace(said, step=step)
