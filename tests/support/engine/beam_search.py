"""Whole beam searches over an engine that has no other work."""

from collections.abc import Sequence

from cluster.core import SamplingParams, TokenArray
from cluster.engine.beam_search import BeamRun
from cluster.engine.engine import Engine
from cluster.requests.fields import BeamSpec
from cluster.spec.beam_search import Hypothesis


def beam_search(
    engine: Engine,
    prompts: Sequence[TokenArray],
    spec: BeamSpec,
    max_tokens: int,
    stop_token_ids: tuple[int, ...] = (),
) -> list[list[Hypothesis]]:
    """The best texts of every prompt, the best first; all are searched at once.

    The engine must have no other work.  Raises RequestError for a prompt that it cannot serve."""
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids, beams=spec)
    runs = {
        f"beams-{index}": BeamRun(f"beams-{index}", ids, params, engine.limits)
        for index, ids in enumerate(prompts)
    }
    try:
        for run in runs.values():
            engine.submit(run.work())
        while engine.has_pending:
            for output in engine.step():
                run = runs[output.request_id]
                run.take(output, engine)
                if run.is_done:
                    engine.release(run.request_id)
                else:
                    engine.submit(run.work())
    finally:
        for name in runs:
            engine.release(name)
    assert all(run.is_done for run in runs.values()), "the engine did not finish"
    return [run.hypotheses for run in runs.values()]
