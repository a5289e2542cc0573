"""A number that says which step this is: ranks that hold different ones must not run it together.

Ranks schedule each for itself from the same calls.  Were one of them ever to hold another page,
miss another prefix or cut another chunk, its forward would have other rows than its neighbours',
and their collectives would hang or add up different tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from cluster.engine.memory.pages import PagePool
from cluster.engine.schedule.batch import Pick
from cluster.engine.schedule.scheduler import Schedule

_DIGEST_BYTES = 8  # a tensor element
_COUNTS = struct.Struct("<3q")
_POOL = struct.Struct("<2q")
_PICK = struct.Struct("<4qQ3q")


def step_digest(schedule: Schedule, picks: Sequence[Pick], pools: Sequence[PagePool]) -> int:
    """An int64 digest of the rows, tokens and slots of a step, of its answers without a forward,
    and of the numbers of free and cached pages, which later steps depend on.

    picks: in the order of their rows, not committed yet.  O(rows), not of the contexts' lengths:
    these enter by the prefix hash and the number of their pages.
    """
    told = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    told.update(_COUNTS.pack(len(picks), schedule.num_rows, schedule.num_preempted))
    for pool in pools:
        told.update(_POOL.pack(pool.num_free, pool.num_idle))
    for pick in picks:
        sequence, tree = pick.sequence, pick.work.tree
        length = sequence.cached_len
        told.update(sequence.request_id.encode())
        told.update(
            _PICK.pack(
                length,
                pick.num_delta,
                pick.num_rows,
                pick.work.num_cached_nodes,
                sequence.hash_at(length),
                pick.completes,
                len(tree),
                sequence.num_pages,
            )
        )
        told.update(pick.delta().tobytes())
        if pick.completes:
            told.update(tree.token_ids.tobytes())
            told.update(tree.parents.tobytes())
        for table in sequence.tables:
            told.update(table.slots[length : length + pick.num_delta + len(tree)].tobytes())
    for answer in schedule.answers:
        told.update(answer.request_id.encode())
        told.update(_PICK.pack(-1 if answer.have_len is None else answer.have_len, *(0,) * 7))
    return int.from_bytes(told.digest(), "little", signed=True)
