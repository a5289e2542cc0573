"""The draft worker where frames are lost or wrong and drafters fail."""

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cluster.core import Commit, Observation, Proposal
from cluster.draft.base import DrafterContext, DraftTask
from cluster.draft.breaker import CircuitBreaker
from cluster.draft.inside import StepRows, StepWants
from cluster.draft.runner import Runner
from cluster.draft.suffix import SuffixDrafter, SuffixOptions
from cluster.errors import CapacityError, ProtocolError, RequestError, WorkerError
from cluster.rpc.messages import Refusal
from cluster.spec.token_log import TokenLog, prefix_hash
from deployments.readiness import is_wanted
from tests.draft.conftest import noisy_engine  # noqa: F401 - a fixture
from tests.support.clock import FakeClock
from tests.support.rpc.faulty import FaultPlan, FaultyLink
from tests.support.worker.draft_peer import (
    TEXT,
    CountingDrafter,
    Peer,
    extension,
    lookup,
    opening,
    peer_of,
)


async def test_a_full_drafter_refuses_and_takes_the_request_when_there_is_room():
    async with peer_of(lookup(max_requests=1), opening("a", TEXT)) as peer:
        await peer.proposal("a")
        await peer.send(opening("b", TEXT))
        frame = await peer.until(lambda frame: bool(frame.refusals))
        assert [(r.request_id, r.code) for r in frame.refusals] == [("b", CapacityError.code)]
        assert frame.num_requests == 1
        await peer.send(released=["a"])
        await peer.send(opening("b", TEXT))
        assert (await peer.proposal("b")).base_len == len(TEXT)


async def test_what_a_frame_releases_makes_room_for_what_it_brings():
    async with peer_of(lookup(max_requests=1), opening("a", TEXT)) as peer:
        await peer.proposal("a")
        await peer.send(opening("b", TEXT), released=["a"])
        assert (await peer.proposal("b")).base_len == len(TEXT)
        assert not any(frame.refusals for frame in peer.frames)
        await peer.send(opening("b", TEXT[:6]), released=["b"])
        await peer.until(lambda frame: frame.observations == (Observation("b", 1, 6),))


async def test_a_commit_that_contradicts_itself_is_refused():
    async with peer_of(lookup(), opening("a", TEXT, prefix_hash=99)) as peer:
        frame = await peer.until(lambda frame: bool(frame.refusals))
        assert frame.refusals[0].code == ProtocolError.code


async def test_a_lost_commit_is_asked_for_again():
    async with peer_of(lookup(), opening("a", TEXT)) as peer:
        await peer.proposal("a")
        await peer.send(extension("a", [*TEXT, 8], [9]))
        frame = await peer.until(lambda frame: bool(frame.observations))
        assert frame.observations == (Observation("a", 1, 8),)
        await peer.send(extension("a", TEXT, [8, 9]))
        assert (await peer.proposal("a")).base_len == 10


class RaisingDrafter(CountingDrafter):
    """Fails over every request whose text holds 13 (observe) or 14 (propose)."""

    def _observe(self, commit: Commit) -> Observation:
        observation = super()._observe(commit)
        if 13 in commit.token_ids:
            raise ValueError(f"the words were {commit.token_ids[0] + 98765}")
        return observation

    def _proposal(self, task: DraftTask) -> Proposal:
        if 14 in self.texts[task.request_id]:
            raise RequestError("too long for this drafter")
        return super()._proposal(task)


@pytest.mark.parametrize(("bad_token", "code"), [(13, WorkerError.code), (14, RequestError.code)])
async def test_a_drafter_that_raises_costs_only_the_request_concerned(
    bad_token: int, code: str, caplog: pytest.LogCaptureFixture
):
    drafter = RaisingDrafter(slices=2)
    with caplog.at_level(logging.DEBUG):
        async with peer_of(
            drafter, opening("good", [1]), opening("bad", [bad_token]), opening("fine", [2])
        ) as peer:
            frame = await peer.until(lambda frame: bool(frame.refusals))
            assert [(r.request_id, r.code) for r in frame.refusals] == [("bad", code)]
            await peer.house.idle()
            proposed = {p.request_id for frame in peer.frames for p in frame.proposals}
            while proposed < {"good", "fine"}:
                proposed |= {p.request_id for p in (await peer.read()).proposals}
            assert proposed == {"good", "fine"}
            assert "1/bad" in drafter.released
            assert set(drafter.texts) == {"1/good", "1/fine"}
            assert peer.house.worker.is_healthy
            await peer.send(opening("bad", [1]))
            assert (await peer.proposal("bad")).base_len == 1
    assert "drafter failed" in caplog.text
    assert "98778" not in caplog.text


@pytest.mark.parametrize(
    ("error", "is_healthy"),
    [(ValueError("no"), False), (RequestError("too long for this drafter"), True)],
)
async def test_a_drafter_that_never_drafts_is_unhealthy_unless_it_says_that_it_cannot(
    error: Exception, is_healthy: bool
):
    class Raising(CountingDrafter):
        def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
            raise error

    async with peer_of(Raising()) as peer:
        for index in range(20):
            await peer.send(opening(str(index), [1]))
            await peer.until(lambda frame: bool(frame.refusals))
        assert peer.house.worker.is_healthy == is_healthy


async def test_a_drafter_that_drafts_for_nobody_lets_its_worker_sleep():
    class Elsewhere(CountingDrafter):
        def _proposal(self, task: DraftTask) -> Proposal:
            return replace(super()._proposal(task), request_id="somebody else's")

    drafter = Elsewhere(slices=10**9)
    async with peer_of(drafter, opening("a", [1, 2])) as peer:
        await peer.until(lambda frame: bool(frame.observations))
        await peer.house.idle()
        assert drafter.num_proposes == 1
        assert not any(frame.proposals for frame in peer.frames)


async def test_a_drafter_that_answers_too_few_commits_is_refused_its_request():
    class Forgetful(CountingDrafter):
        def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
            return []

    async with peer_of(Forgetful(), opening("a", [1])) as peer:
        frame = await peer.until(lambda frame: bool(frame.refusals))
        assert frame.refusals[0].code == ProtocolError.code


async def test_after_any_accidents_on_the_link_the_next_full_commit_sets_things_right():
    drafter = SuffixDrafter(DrafterContext("suffix", 8, 8), SuffixOptions())

    async def no_wait(delay_s: float) -> None:
        await asyncio.sleep(0)

    for seed in range(8):
        async with peer_of(drafter) as peer:
            plan = FaultPlan(seed, drop=0.2, duplicate=0.2, delay=0.1, reorder=0.3)
            faulty = Peer(FaultyLink(peer.link, plan, no_wait))  # type: ignore[arg-type]
            text = TEXT[:3]
            await faulty.send(opening("a", text))
            for token in [8, 9, 5, 6, 7, 8, 9, 5, 6]:
                await faulty.send(extension("a", text, [token]))
                text.append(token)
            await asyncio.sleep(0)
            await peer.send(opening("a", text, generation=2, prompt_len=3))
            frame = await peer.until(lambda f: any(p.generation == 2 for p in f.proposals))
            (proposal,) = frame.proposals
            assert (proposal.base_len, proposal.prefix_hash) == (len(text), prefix_hash(text))
            await peer.send(released=["a"])
            await peer.until(lambda frame: frame.num_requests == 0)


# What the console says of a drafter that fails: what, where, once a minute; never its message.


SECRET = "what the prompt says"
COMMIT = Commit("r", 1, 0, 0, TokenLog().token_ids, 0, 4)


class Raising(CountingDrafter):
    def __init__(self, kind: type[Exception]) -> None:
        super().__init__()
        self.kind = kind

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        raise self.kind(SECRET)

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        raise self.kind(SECRET)

    def release(self, request_ids: Sequence[str]) -> None:
        raise self.kind(SECRET)

    @property
    def wants(self) -> StepWants:
        raise self.kind(SECRET)

    def read(self, rows: Sequence[StepRows]) -> None:
        raise self.kind(SECRET)

    @property
    def pages_in_use(self) -> int:
        raise self.kind(SECRET)

    pages_total = 1

    def interrupt(self) -> None:
        raise self.kind(SECRET)


def contained(drafter: Any, clock: FakeClock) -> Runner:
    return Runner(drafter, "mine", CircuitBreaker(3, 2.0), clock)


def propose(drafter: Runner) -> list[Refusal]:
    drafter.growing["r"] = DraftTask("r", 1, 4)
    return drafter.grow()[1]


def call_all(drafter: Runner) -> list[str]:
    """Calls everything that it has; returns what the refusals say."""
    refusals = [*propose(drafter), *drafter.tell([COMMIT])]
    drafter.release(["r"])
    drafter.interrupt()
    assert drafter._interruptible is None  # it is not asked again
    assert drafter.pages == (0, 0)
    return [getattr(each, "message", "") for each in refusals]


@pytest.mark.parametrize("kind", [ValueError, KeyError, RequestError, ProtocolError])
def test_type_file_and_line_are_said_in_a_line_for_the_console_and_the_message_is_not(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.DEBUG):
        told = call_all(contained(Raising(kind), FakeClock()))
    place = rf"{kind.__name__} \(.*/test_draft_worker_faults\.py, line \d+\)"
    assert caplog.messages
    assert all(re.search(place, line) for line in (*caplog.messages, *told))
    assert SECRET not in "\n".join([caplog.text, *told])
    for record in caplog.records:
        form = "%(levelname)s %(asctime)s %(name)s: %(message)s"
        (line,) = logging.Formatter(form).format(record).splitlines()
        assert is_wanted(line)


def test_a_fault_is_said_once_a_minute_with_its_count(caplog: pytest.LogCaptureFixture):
    clock = FakeClock()
    drafter = contained(Raising(ValueError), clock)
    caplog.clear()
    for _ in range(50):
        propose(drafter)
    of_propose = [line for line in caplog.messages if "request=r " in line]
    assert len(of_propose) == 1
    clock.now += 61.0
    propose(drafter)
    assert "times=51" in [line for line in caplog.messages if "request=r " in line][-1]


def test_an_answer_that_is_none_is_told_without_quoting_it(
    caplog: pytest.LogCaptureFixture,
):
    class Lying(CountingDrafter):
        def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Any]:
            return SECRET

        def observe(self, commits: Sequence[Commit]) -> Sequence[Any]:
            return [SECRET]

    told = call_all(contained(Lying(), FakeClock()))
    assert "a str is no Proposal" in caplog.text
    assert "answered a commit with a str" in caplog.text
    assert SECRET not in "\n".join([caplog.text, *told])
