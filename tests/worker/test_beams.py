"""Beam searches at the target: one item, many steps, nothing left behind."""

from pathlib import Path

import numpy as np
import pytest

from cluster.core import FinishReason, SamplingParams
from cluster.engine.engine import Engine
from cluster.engine.work import Verdict
from cluster.requests.fields import BeamSpec
from cluster.rpc.messages import TextVerdict
from cluster.worker.verifier import Verifier
from tests.support.engine.beam_search import beam_search
from tests.support.engine.driver import load_engine, prompt
from tests.support.engine.integrity import check_integrity
from tests.support.worker.rounds import Session, decode
from tests.support.worker.steps import desk_of
from tests.support.worker.texts import opened

PROMPT = prompt(11, seed=3).tolist()
SPEC = BeamSpec(4)
NUM_TOKENS = 12
STOPS = tuple(range(0, 288, 24))
SEARCH = SamplingParams(max_tokens=NUM_TOKENS, stop_token_ids=STOPS, beams=SPEC)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def engine(llama_folder: Path) -> Engine:
    return load_engine(llama_folder)


def searched(engine: Engine) -> list[tuple[list[int], bool]]:
    """What the engine's own driver finds: texts without their stop tokens."""
    (found,) = beam_search(engine, [PROMPT], SPEC, NUM_TOKENS, STOPS)
    texts = [[beam.token_id for beam in one.beam.lineage()] for one in found]
    return [
        (text[:-1] if one.is_stopped else text, one.is_stopped)
        for text, one in zip(texts, found, strict=True)
    ]


def texts_of(verdict: Verdict | TextVerdict) -> list[tuple[list[int], bool]]:
    edges = np.cumsum([0, *(end.num_tokens for end in verdict.beams)])
    return [
        (verdict.token_ids[start:stop].tolist(), end.is_stopped)
        for start, stop, end in zip(edges, edges[1:], verdict.beams, strict=False)
    ]


def run(verifier: Verifier) -> Verdict:
    """Step until something is said."""
    for _ in range(100):
        frame = verifier.step()
        assert not frame.refused
        # Its rows count like a chunk's, so that nobody takes the step for a plain one.
        assert frame.report.num_prefill_tokens > 0
        assert frame.report.num_sequences == 0
        if frame.verdicts:
            return frame.verdicts[0]
    raise AssertionError("the search never ended")


def test_others_decode_in_the_steps_of_a_search(engine: Engine):
    alone = decode(Verifier(engine), PROMPT, GREEDY, num_tokens=5)
    verifier = Verifier(engine)
    verifier.submit([Session("a", PROMPT, SEARCH).item()])
    other = Session("b", PROMPT, GREEDY)
    for count in range(5):
        verifier.submit([other.item()])
        frame = verifier.step()
        assert [each.request_id for each in frame.verdicts] == ["b"], "it waits for no beam"
        other.take(frame.verdicts[0])
        assert len(other.output) == count + 1
    assert other.output == alone
    verifier.release(["b"])
    assert texts_of(run(verifier)) == searched(engine)


@pytest.mark.parametrize("num_steps", [0, 4])
def test_a_search_that_is_released_leaves_nothing_and_a_new_owner_begins_it_anew(
    engine: Engine, num_steps: int
):
    verifier = Verifier(engine)
    verifier.submit([Session("a", PROMPT, SEARCH).item()])
    for _ in range(num_steps):
        assert not verifier.step().verdicts
    verifier.release(["a"])
    assert engine.pages_in_use == 0
    assert not verifier.has_pending
    check_integrity(engine)
    verifier.submit([Session("a", PROMPT, SEARCH, generation=1).item()])
    assert texts_of(run(verifier)) == searched(engine)


async def test_a_search_among_the_targets_texts_is_one_verdict_that_ends_it(
    engine: Engine,
):
    six = SamplingParams(temperature=0.0, max_tokens=6)
    async with desk_of(opened("b", PROMPT, six), engine=engine) as desk:
        rows, plan = [], desk.target.controller.plan
        desk.target.controller.plan = lambda *asked: (  # type: ignore[method-assign]
            rows.append(asked[3].prompt_rows) or plan(*asked)
        )
        await desk.turn()
        engine.pace.beside_others = 8
        desk.post(opened("a", PROMPT, SEARCH))
        await desk.run()
    # A step is planned with the rows of prompts that it may read.
    assert (rows[0], rows[-1]) == (8, 0)
    (verdict,) = desk.verdicts["a"]
    assert texts_of(verdict) == searched(engine)
    assert (verdict.finish_reason, verdict.num_nodes) == (FinishReason.STOP, 0)
    assert desk.text("b") == decode(Verifier(engine), PROMPT, GREEDY, num_tokens=6)
    assert engine.pages_in_use == 0
