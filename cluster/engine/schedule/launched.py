"""A step on its way: what it runs, and its end, in which the host takes note of it."""

from __future__ import annotations

from collections.abc import Collection

from cluster.engine.memory.page_owners import PageOwners
from cluster.engine.paths import StepOutputs
from cluster.engine.schedule.scheduler import Schedule
from cluster.engine.work import Output, StepSummary
from cluster.records import record


@record
class Launched:
    """schedule: its picks are in the order of the rows.  found: a GPU may still be at it.
    summary: with the host's times until it was launched."""

    schedule: Schedule
    found: StepOutputs
    summary: StepSummary

    def commit(self, owners: PageOwners, lost: Collection[str]) -> list[Output]:
        """Record what has been written, and answer the works that are over.

        lost: the requests whose works are to leave no trace; those that have been released leave
        none in any case."""
        picks, outputs = self.schedule.picks, self.schedule.answers
        sizes = [pick.num_logit_rows for pick in picks]
        for pick, rows in zip(picks, self.found.logits.split_with_sizes(sizes), strict=True):
            sequence, name = pick.sequence, pick.work.request_id
            if owners.sequences.get(name) is not sequence:
                continue
            if name in lost:
                sequence.pending = None
                continue
            owners.commit(sequence, pick.delta())
            if not pick.completes:
                continue
            num_cached, sequence.pending = sequence.num_adopted, None
            sequence.tree = pick.work.tree
            outputs.append(Output(name, rows, None, None, pick.work.top(rows), num_cached))
        return outputs
