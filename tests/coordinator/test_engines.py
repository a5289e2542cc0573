"""What engines compute with is in metrics and reports for as long as their workers are there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.coordinator.moment import record_workers
from cluster.messages import AdapterList, WorkerDescription
from cluster.metrics.recorder import Recorder
from cluster.models.engine_state import EngineState
from tests.support.coordinator.house import house
from tests.support.coordinator.toys import ToyTarget, drafter_description, target_description

SLOW = EngineState(
    "", "cuda:0", "sdpa", "none", "torch", 2**31, 4096, ("attention: no compiler",), "bfloat16"
)
FAST = EngineState("lm", "cuda:0", "triton", "cuda", "triton", 2**20, 512)
TARGET = replace(target_description(), engines=(SLOW, FAST))


@dataclass
class Worker:
    id: str
    description: WorkerDescription
    pages: tuple[int, int] | None = None


async def test_engines_of_drafters_that_were_made_anew_take_the_place_of_the_former() -> None:
    anew = replace(FAST, weights="int8", fallbacks=("graphs: none",))
    toy = ToyTarget()
    async with house() as stage:
        stage.add_target(toy)
        for engines in (TARGET.engines, (SLOW, anew)):
            toy.streams.engines = engines
            toy.streams.announce(AdapterList())
            await stage.settle()
        told = stage.status()["engines"]
        text = stage.metrics()
    assert [(each["name"], each["weights"]) for each in told] == [("", "bfloat16"), ("lm", "int8")]
    lines = [line for line in text.splitlines() if 'engine="lm"' in line]
    assert len(lines) == 2
    assert any(
        line.startswith("drafthouse_engine_fallbacks") and line.endswith(" 1.0") for line in lines
    )


def test_metrics_say_what_is_active_and_what_fell_back() -> None:
    recorder = Recorder()
    record_workers(recorder, [Worker("t-1", TARGET)])
    text = recorder.render().decode()
    assert (
        'drafthouse_engine_info{attention="sdpa",device="cuda:0",engine="",graphs="none",'
        'kernels="torch",role="target",weights="bfloat16",worker="t-1"} 1.0'
    ) in text
    assert 'drafthouse_engine_fallbacks{engine="",role="target",worker="t-1"} 1.0' in text
    assert 'drafthouse_engine_fallbacks{engine="lm",role="target",worker="t-1"} 0.0' in text
    drafter = Worker("d-1", replace(drafter_description("lm"), engines=(SLOW,)))
    record_workers(recorder, [drafter])
    text = recorder.render().decode()
    assert 'drafthouse_engine_fallbacks{engine="",role="drafter",worker="d-1"} 1.0' in text
