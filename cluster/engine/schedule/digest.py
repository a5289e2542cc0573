"""What says which step this is: ranks that would tell something else must not run it together.

Ranks schedule each for itself from the same calls.  Were one of them ever to hold another page,
miss another prefix or cut another chunk, its forward would have other rows than its neighbours',
and their collectives would hang or add up different tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.engine.memory.prefix_cache import PagePool
from cluster.engine.schedule.scheduler import Schedule


def told_of_step(schedule: Schedule, pools: Sequence[PagePool]) -> list[object]:
    """The rows, tokens and slots of a step, its answers without a forward, and the numbers of free
    and cached pages, which later steps depend on: things whose repr tells them whole.

    Its picks are not committed yet.  O(rows), not of the contexts' lengths: these enter by the
    prefix hash and the number of their pages.
    """
    told: list[object] = [schedule.num_rows, schedule.num_preempted]
    told += [(pool.num_free, pool.num_idle) for pool in pools]
    for pick in schedule.picks:
        sequence, work = pick.sequence, pick.work
        length, tree = sequence.cached_len, work.tree
        stop = length + pick.num_delta + len(tree)
        told += [sequence.request_id, length, sequence.hash_at(length), sequence.num_pages]
        told += [pick.num_delta, pick.completes, work.num_cached_nodes, len(tree)]
        told += [pick.delta().tobytes()]
        told += [table.slots[length:stop].tobytes() for table in sequence.tables]
        if pick.completes:
            told += [tree.token_ids.tobytes(), tree.parents.tobytes()]
    return told + [(answer.request_id, answer.have_len) for answer in schedule.answers]
