"""Plug-in drafters that answer anything at all: the worker, its links and the text outlive them."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.core import Commit, Observation, Proposal, TokenTree
from cluster.draft.base import DraftTask
from cluster.errors import ProtocolError
from cluster.rpc.channel import connect_drafter
from cluster.rpc.server import serve_worker
from tests.support.choices import by_day
from tests.support.coordinator.house import SEEDED, at_work
from tests.support.coordinator.toys import ToyTarget
from tests.support.rpc.toys import stopping
from tests.support.worker.draft_peer import (
    CountingDrafter,
    House,
    Peer,
    extension,
    house,
    opening,
    peer_of,
)


def tree(token_ids: Any, parents: Any) -> Callable[[Proposal], Proposal]:
    def told(honest: Proposal) -> Proposal:
        survival = np.full(len(token_ids), 0.5, np.float32)
        return replace(honest, tree=TokenTree(token_ids, parents), survival=survival)

    return told


def changed(**fields: Any) -> Callable[[Proposal], Proposal]:
    return lambda honest: replace(honest, **fields)


INTS = np.arange(80, dtype=np.int32)
PROPOSALS = {
    "nothing": lambda _: None,
    "a string": lambda _: "tree",
    "its own parents": tree(INTS % 32, INTS),
    "parents beyond the tree": tree(INTS % 32, np.full(80, 500, np.int32)),
    "lists": tree([1, 2], [-1, 0]),
    "objects": tree(np.array([None, "a"]), np.array([None, "b"])),
    "numbers of more than 32 bits": tree(np.array([1 << 40]), np.array([-1])),
    "a square": tree(np.zeros((2, 2), np.int32), np.zeros((2, 2), np.int32)),
    "no tree": changed(tree=None),
    "no survival": changed(survival=None),
    "survivals of no number": changed(survival=np.full(1, np.nan, np.float32)),
    "a length below 0": changed(base_len=-1),
    "a length of no number": changed(base_len="long"),
    "a hash of 65 bits": changed(prefix_hash=1 << 64),
    "a generation of no number": changed(generation=None),
    "a request of no name": changed(request_id=["r"]),
    "a request of another": changed(request_id="somebody else's"),
    "a name of bytes": changed(drafter=b"toy"),
    "perhaps complete": changed(is_complete="perhaps"),
    "too many nodes": tree(np.zeros(100_000, np.int32), np.full(100_000, -1, np.int32)),
}
OBSERVATIONS = {
    "nothing": lambda _: None,
    "a length below 0": lambda honest: replace(honest, have_len=-1),
    "a length of no number": lambda honest: replace(honest, have_len="all"),
    "a generation of no number": lambda honest: replace(honest, generation=2.5),
    "another request": lambda honest: replace(honest, request_id="somebody else's"),
}


LIES = {
    **{f"tree: {name}": {"proposes": lie} for name, lie in PROPOSALS.items()},
    **{f"observation: {name}": {"observes": lie} for name, lie in OBSERVATIONS.items()},
}
# Residents answer each of them by day.
FEW = [
    "tree: objects",
    "tree: a length below 0",
    "tree: a request of another",
    "observation: nothing",
]


class Lying:
    """Makes a drafter honest in its first answer and in every third one after that alone."""

    def __init__(
        self,
        proposes: Callable[[Proposal], Any] | None = None,
        observes: Callable[[Observation], Any] | None = None,
    ) -> None:
        super().__init__()
        self.proposes, self.observes = proposes, observes
        self.num_answers = 0

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Any]:
        return self._told(self.proposes, super().propose(tasks))  # type: ignore[misc]

    def observe(self, commits: Sequence[Commit]) -> Sequence[Any]:
        return self._told(self.observes, super().observe(commits))  # type: ignore[misc]

    def _told(self, lie: Callable[[Any], Any] | None, honest: Sequence[Any]) -> Sequence[Any]:
        if lie is None:
            return honest
        self.num_answers += 1
        return honest if self.num_answers % 3 == 1 else [lie(each) for each in honest]


class Liar(Lying, CountingDrafter):
    pass


class Patience(asyncio.Event):
    """Lets a step begin once the drafter has nothing left to do: every tree is there in time."""

    def __init__(self, running: House) -> None:
        super().__init__()
        self._running = running

    async def wait(self) -> bool:
        await self._running.idle()
        return True


@pytest.mark.parametrize("over_the_wire", [False, True], ids=["in process", "wire"])
@pytest.mark.parametrize("name", by_day(FEW, [*LIES]))
async def test_a_plug_in_that_answers_anything_changes_no_text(name: str, over_the_wire: bool):
    """Every text is the target's, and nobody has lost a link."""
    liar = Liar(**LIES[name])
    async with (
        house(liar) as running,
        at_work(
            ToyTarget(gate=Patience(running)), budget="adaptive", breaker_failures=1000
        ) as stage,
        AsyncExitStack() as stack,
    ):
        worker = running.worker
        if over_the_wire:
            server = await stack.enter_async_context(stopping(await serve_worker(worker)))
            _, link = await connect_drafter(server.address)
        else:
            link = running.connect().link
        stage.coordinator.add_drafter("a", "r0", worker.describe(), link)
        await asyncio.gather(stage.ask(), stage.ask(params=SEEDED, id="s"))
        assert stage.target_ids() == ["target-0"]
        assert [each["name"] for each in stage.status()["drafters"]] == ["a"]
        metrics = stage.metrics()
        assert 'drafter="a",why="link"' not in metrics
        assert "drafthouse_bookkeeping_faults_total{" not in metrics
    assert liar.num_answers >= 2  # the second was no honest one


class LiesAboutA(CountingDrafter):
    """Sends sound trees for all requests but `a`."""

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Any]:
        lie = PROPOSALS["its own parents"]
        honest = super().propose(tasks)
        return [lie(each) if each.request_id.endswith("a") else each for each in honest]


async def test_a_proposal_that_is_none_is_refused_and_those_of_others_go_out():
    async with peer_of(LiesAboutA(slices=2), opening("a", [1, 2])) as peer:
        await peer.until(lambda frame: bool(frame.refusals))
        (refusal,) = peer.frames[-1].refusals
        assert (refusal.request_id, refusal.code) == ("a", ProtocolError.code)
        assert "node 0 has parent 0" in refusal.message
        await peer.send(opening("b", [3, 4]))
        assert (await peer.proposal("b")).base_len == 2


async def first_proposal(drafter: CountingDrafter) -> tuple[Peer, Proposal]:
    async with peer_of(drafter, opening("a", [1, 2])) as peer:
        proposal = await peer.proposal("a")
        await peer.send(extension("a", [1, 2], [3]))
        await peer.house.idle()
        return peer, proposal


async def test_wider_numbers_are_narrowed_where_they_fit():
    class Wide(CountingDrafter):
        def _proposal(self, task: DraftTask) -> Proposal:
            honest = super()._proposal(task)
            wide = TokenTree(
                honest.tree.token_ids.astype(np.int64), honest.tree.parents.astype(np.int64)
            )
            return replace(honest, tree=wide, survival=honest.survival.astype(np.float64))  # type: ignore[arg-type]

    _, proposal = await first_proposal(Wide())

    assert proposal.tree.token_ids.dtype == proposal.tree.parents.dtype == np.int32
    assert proposal.survival.dtype == np.float32


async def test_a_drafter_may_use_its_arrays_again():
    class Thrifty(CountingDrafter):
        def __init__(self) -> None:
            super().__init__()
            self.own = []

        def _proposal(self, task: DraftTask) -> Proposal:
            for array in self.own:
                array[:] = 7
            honest = super()._proposal(task)
            self.own += [honest.tree.token_ids, honest.tree.parents]
            return honest

    peer, proposal = await first_proposal(Thrifty())

    trees = [proposal.tree, *(each.tree for frame in peer.frames for each in frame.proposals)]
    assert all(tree.parents.tolist() == list(range(-1, len(tree) - 1)) for tree in trees)


async def test_pages_that_are_no_numbers_are_taken_for_none():
    class Forgetful(CountingDrafter):
        pages_in_use = "many"
        pages_total = 10

    peer, _ = await first_proposal(Forgetful())

    assert {frame.pages_total for frame in peer.frames} == {0}
