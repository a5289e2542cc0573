"""Which of the sequences that are ready share the next batch."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.coordinator.session import Session


def choose_batch(
    ready: Iterable[Session], now: float, max_wait_s: float, step_time_s: float, max_size: int
) -> list[Session]:
    """A batch of one task class and one law, unless someone would wait too long for it.

    The group whose oldest member waits longest always goes at once, so a group alone is never
    delayed.  Another group sits this step out only if, after the `step_time_s` that the step is
    expected to take, none of its members will have waited longer than max_wait_s; else it joins.
    Where more are ready than max_size, the longest waiting of the leading group go first.
    """
    groups: dict[tuple[str, bool], list[Session]] = {}
    for session in ready:
        groups.setdefault(session.group, []).append(session)
    if len(groups) == 1:
        (members,) = groups.values()
        return sorted(members, key=_urgency)[:max_size] if len(members) > max_size else members
    ordered = [sorted(members, key=_urgency) for members in groups.values()]
    ordered.sort(key=lambda members: _urgency(members[0]))
    batch: list[Session] = []
    for rank, members in enumerate(ordered):
        waited_s = now - members[0].ready_since
        if rank == 0 or waited_s + step_time_s > max_wait_s:
            batch.extend(members)
    return batch[:max_size]


def purity(batch: Iterable[Session]) -> float:
    """Share of the batch's most frequent task class."""
    counts: dict[str, int] = {}
    for session in batch:
        counts[session.request.task] = counts.get(session.request.task, 0) + 1
    return max(counts.values()) / sum(counts.values())


def _urgency(session: Session) -> tuple[float, int]:
    return session.ready_since, session.arrival
