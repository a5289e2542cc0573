"""One of two ranks whose layers are fused and whose steps are graphs, under Triton's interpreter.

python -m tests.support.engine.graph_process RANK ADDRESS FOLDER; rank 0 prints a line of JSON: the
largest difference of logits and taps to those of one process, the steps that were replays, the
steps, and what it fell back to.  Then both load once more; rank 1 cannot launch a kernel, and its
first capture fails.  Both print what they fall back to.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from cluster.core import TokenTree, token_array
from cluster.engine.fused import forward
from cluster.engine.work import Work
from tests.support.engine.captures import Recorder
from tests.support.engine.driver import prompt
from tests.support.engine.graphs import answers, build, decoding
from tests.support.engine.ranks import joined, say
from tests.support.engine.taps import TapLog

STEPS = [
    *decoding("a", 6, 2),
    [Work("b", 0, prompt(5)), Work("a", 8, token_array([3]), TokenTree.of([5, 6], [-1, 0]))],
]
TAPS = (0, -1)


class Failing(Recorder):
    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        super().__call__(run)
        raise RuntimeError("no graph today")


def main() -> None:
    # A rank that the other does not wait for ends the test, and not after hours.
    with joined(timeout_s=120, loading_s=120) as (rank, (folder,)):
        _compare(rank, Path(folder))


def _compare(rank: int, folder: Path) -> None:
    recorder = Recorder()
    engine = build(folder, recorder, fused=True, tensor_parallel=2)
    assert engine.model.fused is not None
    if rank:
        engine.follow()
    else:
        before = recorder.num_replays
        found = answers(engine, STEPS)
        num_replays = recorder.num_replays - before
        errors = [
            float((own - other).abs().max())
            for own, other in zip(found, answers(build(folder), STEPS), strict=True)
        ]
        log, alone = TapLog(engine, TAPS), TapLog(build(folder), TAPS)
        engine.capture_ahead(TAPS)
        num_captures = recorder.num_captures
        for each in (log, alone):
            each.run(Work("t", 0, prompt(5, seed=4)))
        errors += [
            float((rows - alone.context["t"][at]).abs().max())
            for at, rows in log.context["t"].items()
        ]
        assert recorder.num_captures == num_captures, "they were captured ahead"
        engine.close()
        say(json.dumps([max(errors), num_replays, len(STEPS), engine.forward.fallbacks]))
    if rank:
        forward.silu_product = _fails
    capture = Failing() if rank else Recorder()
    failing = build(folder, capture, fused=True, tensor_parallel=2)
    say(json.dumps(list(failing.forward.fallbacks)))


def _fails(*_: object) -> torch.Tensor:
    raise RuntimeError("no compiler today")


if __name__ == "__main__":
    main()
