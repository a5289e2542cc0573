"""The time that a drafter computes is told to one of its coordinators, and told once."""

from __future__ import annotations

import itertools

from cluster.messages import ProposalFrame
from cluster.worker.lease import DrafterLoad, DraftLease
from tests.support.worker.draft_peer import CountingDrafter, House, house, opening


async def frames_of_two_links(running: House, drafter: CountingDrafter) -> list[ProposalFrame]:
    """All that two links are told, each of which has a text drafted and released.

    Either may be told of the drafter."""
    peers = {name: running.connect() for name in "ab"}
    for name, peer in peers.items():
        await peer.send(opening(name, [1]))
        await drafter.content()
    for name, peer in peers.items():
        await peer.send(released=[name])
    for peer in peers.values():
        await peer.until(lambda frame: frame.num_requests == 0)
    return [frame for peer in peers.values() for frame in peer.frames]


async def test_each_second_of_a_drafter_is_told_to_one_link() -> None:
    ticks, drafter = itertools.count(), CountingDrafter(slices=3)
    async with house(drafter, clock=lambda: float(next(ticks))) as running:
        frames = await frames_of_two_links(running, drafter)
    # For each text one observe and four proposes of one tick each.
    assert sum(frame.draft_time_s for frame in frames) == 10.0


async def test_time_that_was_not_told_yet_adds_up() -> None:
    lease = DraftLease(1)
    times = []
    for untold in ((1.0, 0.5), (0.0,), (2.5,)):
        for draft_time_s in untold:
            lease.put([], DrafterLoad(num_requests=len(times) + 1), draft_time_s)
        frame = await lease.next_frame()
        assert frame is not None
        times.append(frame.draft_time_s)
    assert times == [1.5, 0.0, 2.5]
