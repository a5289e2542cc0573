"""A fault of one text stays with that text."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.core import SamplingParams, TokenTree
from cluster.errors import WorkerError
from cluster.messages import StepReport
from cluster.worker.verifier import Verifier
from tests.support.worker.rounds import Session, decode, decode_all, no_drafts, random_drafts
from tests.support.worker.toy_engine import ToyEngine, hashed_law

VOCAB_SIZE = 12
PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(0.0)


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine(vocab_size=VOCAB_SIZE, max_context_len=64)


@pytest.fixture
def verifier(engine: ToyEngine) -> Verifier:
    return Verifier(engine)


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(0.8, 0.9, seed=1), SamplingParams(0.0, repetition_penalty=2.0)],
)
def test_logits_of_nan_refuse_their_item_alone(params: SamplingParams) -> None:
    sound = hashed_law(VOCAB_SIZE)

    def law(context: list[int]) -> np.ndarray:
        row = sound(context)
        return np.full_like(row, np.nan) if context[0] == 9 else row

    verifier = Verifier(ToyEngine(law, VOCAB_SIZE))
    good, bad = Session("good", PROMPT, params), Session("bad", [9, 1], params)
    tree = TokenTree.chain([1, 2])

    verifier.submit([bad.item(tree), good.item(tree)])
    frame = verifier.step()

    assert {name: type(error) for name, error in frame.refused.items()} == {"bad": WorkerError}
    assert "finite" in frame.refused["bad"].message
    good.take(frame.verdicts[0])
    assert good.output == decode(
        Verifier(ToyEngine(sound, VOCAB_SIZE)), PROMPT, params, num_tokens=len(good.output)
    )


def test_nan_behind_a_wrong_draft_does_not_reach_the_text() -> None:
    sound = hashed_law(VOCAB_SIZE)
    truth = int(sound(PROMPT).argmax())
    wrong = (truth + 1) % VOCAB_SIZE

    def law(context: list[int]) -> np.ndarray:
        row = sound(context)
        return np.full_like(row, np.nan) if context[-1] == wrong else row

    verifier = Verifier(ToyEngine(law, VOCAB_SIZE))
    verifier.submit([Session("r", PROMPT, GREEDY).item(TokenTree.of([wrong], [-1]))])
    verdict = verifier.step().verdicts[0]

    assert verdict.token_ids.tolist() == [truth]


def test_another_prefix_is_a_miss_that_heals(verifier: Verifier, engine: ToyEngine) -> None:
    session = Session("r", PROMPT, GREEDY)
    decode_all(verifier, [session], [no_drafts], 3)
    plain = session.output
    engine.contexts["r"][1] = 7  # what the target holds is no longer what was committed

    decode_all(verifier, [session], [no_drafts], 8)

    assert session.num_misses == 1
    fresh = decode(Verifier(ToyEngine(vocab_size=VOCAB_SIZE)), PROMPT, GREEDY)
    assert session.output[:8] == fresh[:8]
    assert session.output[:3] == plain


def test_a_released_request_leaves_nothing_behind(verifier: Verifier, engine: ToyEngine) -> None:
    sessions = [Session(f"r{i}", PROMPT, GREEDY) for i in range(3)]
    decode_all(verifier, sessions, [no_drafts] * 3, 2)
    verifier.submit([session.item() for session in sessions])

    verifier.release(["r0", "r1", "never known"])
    frame = verifier.step()
    verifier.release(["r2"])

    assert [verdict.request_id for verdict in frame.verdicts] == ["r2"]
    assert engine.contexts == {}
    assert len(verifier._sequences) == 0


def test_the_report_counts_sequences_and_nodes_and_times_by_the_clock(engine: ToyEngine) -> None:
    ticks = iter(range(100))
    verifier = Verifier(engine, clock=lambda: float(next(ticks)))
    one, other = Session("a", PROMPT, GREEDY), Session("b", PROMPT, GREEDY)

    verifier.submit([one.item(TokenTree.chain([1, 2, 3])), other.item()])
    report = verifier.step().report  # from 0 to 1

    assert report == StepReport(
        step_time_s=1.0,
        num_sequences=2,
        num_nodes=3,
        num_rows=2 * len(PROMPT) + 3,
        num_prompt_tokens=2 * len(PROMPT),
        num_emitted_tokens=2,
        pages_in_use=2,
        pages_total=1000,
    )


def test_a_tree_that_is_verified_again_has_the_same_verdict(verifier: Verifier) -> None:
    params = SamplingParams(0.9, frequency_penalty=0.5, seed=3)
    session = Session("r", PROMPT, params)
    decode_all(verifier, [session], [no_drafts], 4)
    item = session.item(random_drafts(1, VOCAB_SIZE)(PROMPT))

    verdicts = []
    for held_len in (session.record.held_len, session.record.held_len, 0):
        session.record.held_len = held_len
        assert verifier.submit([item]) == {}
        verdicts.append(verifier.step().verdicts[0])

    assert verdicts[2].token_ids.tolist() == verdicts[0].token_ids.tolist()
    assert verdicts[0].token_ids.tolist() == verdicts[1].token_ids.tolist()
    assert verdicts[0].context_len == verdicts[1].context_len
