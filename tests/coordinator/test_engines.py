"""What engines compute with is in metrics and reports for as long as their workers are there."""

from dataclasses import replace

from cluster.messages import AdapterList
from cluster.models.engine_state import EngineState
from tests.support.coordinator.house import at_work
from tests.support.coordinator.toys import ToyTarget

SLOW = EngineState(
    "", "cuda:0", "sdpa", "none", "torch", 2**31, 4096, ("attention: no compiler",), "bfloat16"
)
FAST = EngineState("lm", "cuda:0", "triton", "cuda", "triton", 2**20, 512)


async def test_engines_of_drafters_that_were_made_anew_take_the_place_of_the_former():
    anew = replace(FAST, weights="int8", fallbacks=("graphs: none",))
    toy = ToyTarget()
    async with at_work(toy) as stage:
        for engines in ((SLOW, FAST), (SLOW, anew)):
            toy.streams.engines = engines
            toy.streams.announce(AdapterList())
            await stage.settle()
        told = stage.status()["engines"]
        text = stage.metrics()
    assert [(each["name"], each["weights"]) for each in told] == [("", "bfloat16"), ("lm", "int8")]
    assert [line for line in text.splitlines() if 'engine="lm"' in line] == [
        'drafthouse_engine_info{attention="triton",device="cuda:0",engine="lm",graphs="cuda",'
        'kernels="triton",role="target",weights="int8",worker="target-0"} 1.0',
        'drafthouse_engine_fallbacks{engine="lm",role="target",worker="target-0"} 1.0',
    ]
