"""A drafter whose drafts nobody verifies computes nothing, and is back when they are of use.

Time is virtual.  The target takes time for every node as for every sequence, as a processor does
that has no arithmetic to spare, beside what a step takes anyway.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cluster.coordinator.session import Session
from cluster.core import Commit
from cluster.errors import WorkerError
from cluster.messages import StepReport, VerdictFrame, VerifyFrame
from cluster.rpc.link import Link
from cluster.spec.demand import APART_NODES
from tests.support.coordinator.house import GREEDY, House, collect, house, request, text_of
from tests.support.coordinator.toys import Grow, ToyTarget, oracle_chain, plain_text, random_tree
from tests.support.coordinator.virtual_time import TimedDrafter, VirtualTime

LONG = replace(GREEDY, max_tokens=400)


@dataclass
class CostlyTarget(ToyTarget):
    """A step takes step_s, and row_s for each row beyond the first `free_rows`."""

    time: VirtualTime = None  # type: ignore[assignment]
    step_s: float = 0.010
    row_s: float = 0.010
    free_rows: int = 1

    async def serve(self, link: Link[VerdictFrame, VerifyFrame]) -> None:
        try:
            async for frame in link:
                self.frames.append(frame)
                rows = sum(1 + len(item.tree) for item in frame.items)
                step_s = self.step_s + self.row_s * max(rows - self.free_rows, 0) if rows else 0.0
                await self.time.sleep(step_s)
                answer = self.answer(frame)
                assert isinstance(answer.report, StepReport)
                await link.send(replace(answer, report=replace(answer.report, step_time_s=step_s)))
        except WorkerError:
            return
        finally:
            self.contexts.clear()


class AskedDrafter(TimedDrafter):
    """Grows what it is asked for; nothing for max_nodes 0."""

    def commits(self) -> list[Commit]:
        return [commit for frame in self.frames for commit in frame.commits]

    def answer(self, frame: Any) -> Any:
        wanted = {commit.request_id for commit in frame.commits if commit.max_nodes}
        answer = super().answer(frame)
        proposals = tuple(each for each in answer.proposals if each.request_id in wanted)
        # As one of its kind: it uses all the time there is.
        draft_time_s = 0.010 * len(proposals)
        return replace(answer, proposals=proposals, draft_time_s=draft_time_s)


@dataclass
class Stage:
    house: House
    time: VirtualTime
    target: CostlyTarget
    drafters: dict[str, AskedDrafter]

    async def run(self, *ids: str) -> None:
        """Requests side by side to their ends."""
        for each in self.drafters.values():
            each.frames.clear()
        coordinator = self.house.coordinator
        running = [
            asyncio.create_task(collect(coordinator, request([1, 2, 3 + i], LONG, name)))
            for i, name in enumerate(ids)
        ]
        await self.time.run_until(lambda: all(each.done() for each in running))
        for index, each in enumerate(running):
            assert text_of(await each) == plain_text([1, 2, 3 + index], LONG)

    def counter(self, name: str, *labels: str) -> float:
        rendered = self.house.coordinator.render_metrics().decode()
        return sum(
            float(match.group(2))
            for match in re.finditer(rf"^{name}_total{{(.*?)}} (\S+)$", rendered, re.MULTILINE)
            if all(label in match.group(1) for label in labels)
        )


@asynccontextmanager
async def stage(
    drafters: dict[str, Grow],
    delay_s: float = 0.001,
    slack: float = 8.0,
    devices: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    model_hash: str = "m",
    **target: float,
) -> AsyncIterator[Stage]:
    time = VirtualTime()
    async with house(
        drafters=tuple(drafters), clock=time, timer=time.timer, budget="adaptive",
        max_draft_wait_ms=0.0, slowdown_slack=slack,
    ) as built:  # fmt: skip
        costly = CostlyTarget(time=time, devices=devices[0], **target)  # type: ignore[arg-type]
        built.add_target(costly)
        toys = {
            name: AskedDrafter(
                name,
                grow,
                survival=0.9,
                time=time,
                delay_s=delay_s,
                devices=devices[1],
                model_hash=model_hash,
            )
            for name, grow in drafters.items()
        }
        for toy in toys.values():
            built.add_drafter(toy)
        yield Stage(built, time, costly, toys)


def share_asked(commits: Sequence[Commit]) -> float:
    return sum(each.max_nodes > 0 for each in commits) / LONG.max_tokens


async def test_a_drafter_of_random_tokens_is_asked_for_nothing_most_of_the_time() -> None:
    async with stage({"a": random_tree(5)}) as random:
        await random.run("first")
        await random.run("second")
        commits = random.drafters["a"].commits()
        assert share_asked(commits) < 0.1
        assert len(commits) < 0.2 * LONG.max_tokens
        parked = random.counter("drafthouse_drafter_commits", 'demand="parked"')
        growing = random.counter("drafthouse_drafter_commits", 'demand="growing"')
        assert parked > 5 * growing


async def test_a_drafter_that_is_right_is_asked_for_drafts_all_the_time() -> None:
    async with stage({"a": oracle_chain(16)}, free_rows=8) as right:
        await right.run("r")
        commits = right.drafters["a"].commits()
        # But for the one silence in which plain steps are measured.
        silent = [place for place, commit in enumerate(commits) if commit.max_nodes < 4]
        assert len(silent) <= 5
        assert silent == list(range(silent[0], silent[0] + len(silent)))
        num_asked = len(commits) - len(silent)
        assert right.counter("drafthouse_draft_demand_nodes") >= 4 * num_asked


async def test_a_silenced_drafter_need_not_read_the_prompt_of_a_short_text() -> None:
    async with stage({"a": random_tree(5)}) as random:
        (seat,) = random.house.coordinator._targets.seats
        drafts = random.house.coordinator._pool._demand

        @dataclass
        class Text:
            target: Any
            subscriptions: dict[str, Any]
            num_silent_commits: int = 0
            in_sampled_batch: bool = False
            drafters: tuple[str, ...] = ("a",)
            request: Any = None

        known, new = (
            Text(seat, subscriptions, request=request([1, 2])) for subscriptions in ({"a": 1}, {})
        )
        assert not drafts.skips(known, ("a",))  # type: ignore[arg-type]
        seat.silences[True] = 1  # of sampled text, which these are not
        assert not drafts.skips(known, ("a",))  # type: ignore[arg-type]
        seat.silences[False] = 1
        for text, told in ((known, {0, 15, 31}), (new, {15, 31})):
            found = [not drafts.skips(text, ("a",)) for _ in range(40)]  # type: ignore[arg-type]
            assert {place for place, each in enumerate(found) if each} == told


@pytest.mark.parametrize(
    ("is_model", "num_left", "is_known", "told"),
    [
        (True, 100, True, [0]),  # it hears that it is to stop, and then nothing more
        (True, 100, False, []),
        (False, 100, True, [0, 15, 31]),  # a look-up learns from what it hears
        (True, 16, True, [0, 15, 31]),  # soon it is to draft again
        (True, 16, False, [15, 31]),
    ],
)
async def test_a_model_hears_nothing_of_a_text_while_it_is_silent_for_long(
    is_model: bool, num_left: int, is_known: bool, told: list[int]
) -> None:
    async with stage({"a": random_tree(5)}) as random:
        (seat,) = random.house.coordinator._targets.seats
        drafts = random.house.coordinator._pool._demand
        session = Session("s", request([1, 2]), lambda event: None, 0, 0.0)
        session.target, session.drafters = seat, ("a",)
        if is_known:
            session.subscriptions["a"] = object()  # type: ignore[assignment]
        seat.silences[session.is_sampled] = num_left
        heard = [
            place
            for place in range(40)
            if not (
                drafts.skips(session, ("a",)) or drafts.passes_over(session, "a", is_model=is_model)
            )
        ]
        assert heard == told
        seat.silences[session.is_sampled] = 0
        assert not drafts.skips(session, ("a",))
        assert not drafts.passes_over(session, "a", is_model=is_model)


async def test_a_useless_drafter_is_parked_beside_a_useful_one() -> None:
    async with stage({"a": oracle_chain(8), "b": random_tree(5)}, free_rows=6) as mixed:
        await mixed.run("first")
        await mixed.run("second")
        useful, useless = (mixed.drafters[name].commits() for name in ("a", "b"))
        assert all(commit.max_nodes for commit in useful)
        # Of 32 tokens eight random ones are lucky now and then.
        assert sum(each.max_nodes > 0 for each in useless) < 0.3 * len(useful)


async def test_drafts_that_pay_for_one_sequence_only_pause_under_load_and_are_back_after() -> None:
    # Six rows are free: enough for one sequence and its drafts, not for eight sequences.
    # The account has room: what a crowd has lost must not be what stops a single one.
    async with stage({"a": oracle_chain(16)}, slack=1e3, free_rows=6, row_s=0.012) as costly:
        await costly.run("alone")
        alone = len(costly.target.frames)
        await costly.run(*(f"crowd {index}" for index in range(8)))
        await costly.run(*(f"crowd again {index}" for index in range(8)))
        assert share_asked(costly.drafters["a"].commits()) / 8 < 0.2
        before = len(costly.target.frames)
        await costly.run("alone again")
        assert len(costly.target.frames) - before < 1.2 * alone


async def test_a_parked_drafter_is_told_the_whole_text_before_it_drafts_again() -> None:
    """The toy asks for the rest where a commit does not continue what it holds."""
    async with stage({"a": random_tree(5)}) as random:
        await random.run("r")
        commits = random.drafters["a"].commits()
        assert [commit.base_len for commit in commits] == sorted(c.base_len for c in commits)
        for sooner, later in itertools.pairwise(commits):
            assert later.base_len == sooner.base_len + len(sooner.token_ids)


async def test_a_fixed_budget_asks_for_all_always() -> None:
    async with house(drafters=("a",), budget="fixed", max_draft_tokens=4) as built:
        built.add_target(ToyTarget())
        drafter = AskedDrafter("a", random_tree(5), time=VirtualTime(), delay_s=0.0)
        drafter.answers = lambda: False
        built.add_drafter(drafter)
        await collect(built.coordinator, request(params=LONG))
        assert {commit.max_nodes for commit in drafter.commits()} == {12}


@pytest.mark.parametrize(
    ("target", "drafter", "is_apart"),
    [
        (("x/gpu0", "x/gpu1"), ("x/gpu2",), True),
        (("x/gpu0",), ("y/gpu0",), True),
        (("x/cpu0", "x/cpu1"), ("x/cpu1",), False),
        ((), ("x/cpu1",), False),
        (("x/cpu1",), (), False),
    ],
)
async def test_who_drafts_on_devices_of_its_own_is_asked_for_broad_trees(
    target: tuple[str, ...], drafter: tuple[str, ...], is_apart: bool
) -> None:
    async with stage({"a": oracle_chain(16)}, free_rows=8, devices=(target, drafter)) as right:
        await right.run("r")
        asked = [commit.max_nodes for commit in right.drafters["a"].commits() if commit.max_nodes]
        assert (min(asked) == APART_NODES) == is_apart
        assert (max(asked) >= APART_NODES) == is_apart


async def test_look_ups_are_not_asked_for_what_they_would_build_anew_each_time() -> None:
    apart = (("x/gpu0",), ("x/cpu0",))
    async with stage({"a": oracle_chain(16)}, free_rows=8, devices=apart, model_hash="") as right:
        await right.run("r")
        assert max(commit.max_nodes for commit in right.drafters["a"].commits()) < APART_NODES


APART = (("x/gpu0",), ("x/gpu1",))


@pytest.mark.parametrize("model_hash", ["m", ""], ids=["model", "look-up"])
@pytest.mark.parametrize("grow", [random_tree(5), oracle_chain(16)], ids=["in vain", "right"])
async def test_who_drafts_on_devices_of_its_own_is_never_silenced_or_parked(
    grow: Grow, model_hash: str
) -> None:
    async with stage({"a": grow}, devices=APART, model_hash=model_hash) as apart:
        await apart.run("first")
        await apart.run("second", "third")
        commits = apart.drafters["a"].commits()
        assert all(commit.max_nodes for commit in commits)
        # It hears of every token as soon as there is one.
        assert all(len(commit.token_ids) < 20 for commit in commits)
        assert apart.counter("drafthouse_drafter_commits", 'demand="parked"') == 0


async def test_drafts_from_other_devices_are_used_while_those_beside_the_target_are_silent() -> (
    None
):
    drafters = {"near": random_tree(5), "far": oracle_chain(16)}
    async with stage(drafters, devices=APART, free_rows=8) as mixed:
        near, far = mixed.drafters["near"], mixed.drafters["far"]
        mixed.house.coordinator.remove_drafter("near", "r0")
        near.devices = ("x/gpu0",)
        mixed.house.add_drafter(near)
        for name in ("first", "second"):
            await mixed.run(name)
            assert not all(commit.max_nodes for commit in near.commits())
            assert all(commit.max_nodes for commit in far.commits())
            assert 0 < len(far.commits()) < 0.3 * LONG.max_tokens, "its drafts save steps"
        assert share_asked(near.commits()) < 0.1
