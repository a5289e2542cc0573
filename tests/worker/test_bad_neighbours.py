"""Good drafters draft from the first answer, whatever raises, lies or sleeps beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cluster.core import DraftTask, Proposal, TokenTree
from cluster.engine.work import Output
from tests.support.clock import FakeClock
from tests.support.worker.residents import GreedyOracle, resident
from tests.support.worker.steps import desk_of
from tests.support.worker.texts import GREEDY, opened, plain
from tests.support.worker.toy_engine import ToyEngine

PARAMS = replace(GREEDY, max_tokens=40)
STEP_S = 0.01


class TimedEngine(ToyEngine):
    """Its steps take as long as those of a small model."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def step(self, taps: Sequence[int] = ()) -> list[Output]:
        outputs = super().step(taps)
        self._clock.now += STEP_S + 0.0002 * self.last_step.num_nodes
        return outputs


class Timed(GreedyOracle):
    """A look-up that takes next to no time."""

    is_look_up = True

    def __init__(self, clock: FakeClock, name: str) -> None:
        super().__init__(name=name)
        self._clock = clock

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self._clock.now += 0.0001
        return super().propose(tasks)


class Raising(Timed):
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        raise ValueError("what the prompt says")


class Lying(Timed):
    def _proposal(self, task: DraftTask) -> Proposal:
        honest = super()._proposal(task)
        return replace(honest, tree=TokenTree.chain([99]), survival=np.ones(1, np.float32))


class Sleeping(Timed):
    """Takes much longer than any step whenever it is asked."""

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self._clock.now += 0.5
        return []


class SleepingModel(Sleeping):
    is_look_up = False


class RaisingModel(Raising):
    is_look_up = False


BAD: dict[str, list[type[Timed]]] = {
    "nobody": [],
    "raising": [Raising],
    "lying": [Lying],
    "sleeping": [Sleeping],
    "models": [RaisingModel, SleepingModel],
    "all": [RaisingModel, Lying, SleepingModel, Sleeping],
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
async def test_a_good_drafter_drafts_from_the_first_answer(bad: list[type[Timed]]) -> None:
    clock = FakeClock()
    drafters = {"good": Timed(clock, "good")}
    drafters |= {kind.__name__: kind(clock, kind.__name__) for kind in bad}
    residents = [resident(each, name, clock) for name, each in drafters.items()]
    async with desk_of(
        engine=TimedEngine(clock), residents=residents, clock=clock, budget="adaptive"
    ) as desk:
        for index in range(6):
            name = f"r{index}"
            desk.post(opened(name, params=PARAMS, drafters=tuple(drafters)))
            await desk.run()
            assert desk.text(name) == plain(params=PARAMS)
            accepted = [bits for each in desk.verdicts[name] for bits in each.sources.tolist()]
            assert any(bits & 1 for bits in accepted), f"answer {index}"
            clock.now += 60.0  # whoever rests has rested
