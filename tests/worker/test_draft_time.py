"""The time that a drafter computes is told to one of its coordinators, and told once."""

from __future__ import annotations

from cluster.worker.lease import DrafterLoad, DraftLease, ToldTime


async def test_each_second_of_a_drafter_is_told_to_one_link() -> None:
    told = ToldTime()
    first, second = DraftLease(1, told), DraftLease(2, told)
    times = []
    for lease, busy_s in ((first, 1.0), (second, 1.5), (first, 1.5), (second, 4.0)):
        lease.put([], DrafterLoad(num_requests=len(times) + 1), busy_s)
        frame = await lease.next_frame()
        assert frame is not None
        times.append(frame.draft_time_s)
    assert times == [1.0, 0.5, 0.0, 2.5]
    late = DraftLease(3, told)  # a coordinator that is started again
    late.put([], DrafterLoad(num_requests=9), 4.25)
    frame = await late.next_frame()
    assert frame is not None
    assert frame.draft_time_s == 0.25
