"""What targets answer, checked before it changes anything."""

from __future__ import annotations

from cluster.coordinator.session import InFlight
from cluster.core import Verdict, VerdictFrame


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


def is_sound(verdict: Verdict, in_flight: InFlight, vocab_size: int) -> bool:
    """Whether the path is one of the item's tree and the tokens are the path's and one more."""
    path = verdict.path.tolist()
    token_ids = verdict.token_ids.tolist()
    if len(token_ids) != len(path) + 1 or not 0 <= token_ids[-1] < (vocab_size or 2**31):
        return False
    parent = -1
    for node, token in zip(path, token_ids, strict=False):
        if not 0 <= node < len(in_flight.tree) or in_flight.tree.parents[node] != parent:
            return False
        if in_flight.tree.token_ids[node] != token:
            return False
        parent = node
    return True
