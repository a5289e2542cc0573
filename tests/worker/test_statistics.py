"""What workers say of themselves to those who decide how many of them there should be."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

from cluster.core import EMPTY_TREE, DraftTask, Proposal
from tests.support.worker.draft_peer import CountingDrafter, extension, opening, peer_of
from tests.support.worker.stage import stage, worker_of

NOTHING = np.zeros(0, dtype=np.float32)


class GatedDrafter(CountingDrafter):
    """Has nothing to offer while the gate is closed, and says that more may come."""

    def __init__(self) -> None:
        super().__init__(slices=10**9)
        self.gate = threading.Event()

    def _proposal(self, task: DraftTask) -> Proposal:
        found = super()._proposal(task)
        return found if self.gate.is_set() else replace(found, tree=EMPTY_TREE, survival=NOTHING)


async def test_a_commit_is_late_if_no_tree_came_since_the_last_one() -> None:
    drafter = GatedDrafter()
    async with peer_of(drafter, opening("a", [1, 2])) as peer:
        await peer.until(lambda frame: bool(frame.observations))
        await peer.send(extension("a", [1, 2], [3]))
        await peer.until(lambda frame: bool(frame.observations))
        said = peer.house.worker.statistics()
        assert (said["texts"], said["late"]) == (1, 0.5)
        drafter.gate.set()
        await peer.proposal("a")
        await peer.send(extension("a", [1, 2, 3], [4]))
        await peer.until(lambda frame: bool(frame.observations))
        assert peer.house.worker.statistics()["late"] == 0.0
        assert peer.house.worker.statistics()["late"] == 0.0, "nothing has come since"


async def test_a_target_says_how_full_it_is() -> None:
    async with stage(worker_of({})) as built:
        assert built.worker.statistics() == {"texts": 0, "places": 64, "kv_use": 0.0}
