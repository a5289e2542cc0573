"""What targets answer, checked before it changes anything."""

from __future__ import annotations

import math

from cluster.coordinator.in_flight import InFlight
from cluster.core import Verdict
from cluster.messages import StepReport, VerdictFrame


def is_stuck(frame: VerdictFrame) -> bool:
    """Whether a step could do nothing: the target lacks pages for all that it was sent.

    A report of no step (after releases) is none of that: the batch in flight may still be ahead.
    """
    report = frame.report
    return (
        report is not None
        and report.step_time_s > 0.0
        and not (frame.verdicts or frame.misses or frame.refusals)
        and report.num_prefill_tokens == 0
    )


def is_credible(report: StepReport) -> bool:
    """Whether the times of a report can be times: one that is no number spoils every mean."""
    times_s = (report.step_time_s, report.forward_time_s, report.queue_time_s)
    return all(math.isfinite(time_s) and time_s >= 0.0 for time_s in times_s)


def are_beams_sound(verdict: Verdict, num_beams: int, vocab_size: int) -> bool:
    """Whether its texts are some of so many beams and have as many tokens as they say."""
    token_ids, ends = verdict.token_ids, verdict.beams
    if not 1 <= len(ends) <= num_beams or len(verdict.path):
        return False
    if sum(end.num_tokens for end in ends) != len(token_ids):
        return False
    if not all(math.isfinite(end.logprob) and math.isfinite(end.score) for end in ends):
        return False
    return not len(token_ids) or 0 <= token_ids.min() <= token_ids.max() < (vocab_size or 2**31)


def is_sound(verdict: Verdict, in_flight: InFlight, vocab_size: int) -> bool:
    """Whether the path is one of the item's tree and the tokens are the path's and one more."""
    path = verdict.path.tolist()
    token_ids = verdict.token_ids.tolist()
    if len(token_ids) != len(path) + 1 or not 0 <= token_ids[-1] < (vocab_size or 2**31):
        return False
    if not path:
        return True
    tree = in_flight.tree
    if min(path) < 0 or max(path) >= len(tree.token_ids):
        return False
    parents: list[int] = tree.parents[verdict.path].tolist()
    drafted: list[int] = tree.token_ids[verdict.path].tolist()
    return parents == [-1, *path[:-1]] and drafted == token_ids[:-1]
