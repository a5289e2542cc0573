"""What is wrong with one item stays with that item."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cluster.core import SamplingParams, TokenTree, VerifyItem, token_array
from cluster.messages import Refusal, StepReport
from cluster.worker.item_check import CacheMiss
from cluster.worker.verifier import Verifier
from tests.support.worker.rounds import Session, decode, decode_all, no_drafts, random_drafts
from tests.support.worker.toy_engine import ToyEngine, hashed_law

VOCAB_SIZE = 12
PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(0.0)


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine(hashed_law(VOCAB_SIZE), VOCAB_SIZE, max_context_len=64)


@pytest.fixture
def verifier(engine: ToyEngine) -> Verifier:
    return Verifier(engine)


def opening(request_id: str = "bad", **changes: object) -> VerifyItem:
    item = Session(request_id, PROMPT, SamplingParams(0.7, seed=1)).item(TokenTree.chain([1, 2]))
    return dataclasses.replace(item, **changes)


MALFORMED = {
    "sibling twice": ({"tree": TokenTree.of([1, 1], [-1, -1])}, "repeats token 1"),
    "parent after child": ({"tree": TokenTree.of([1, 2], [1, -1])}, "parent 1"),
    "token in the tree": ({"tree": TokenTree.of([VOCAB_SIZE], [-1])}, f"token {VOCAB_SIZE}"),
    "token in the delta": ({"delta": token_array([1, 2, 3, 4, 99])}, "vocabulary"),
    "negative base_len": ({"base_len": -1}, "base_len is -1"),
    "empty delta": ({"delta": token_array([])}, "delta is empty"),
    "hash of nothing": ({"prefix_hash": 5}, "prefix_hash is 5"),
    "no params": ({"params": None}, "params"),
    "part of the prompt": ({"prompt_len": 9}, "prompt_len is 9"),
    "no prompt": ({"prompt_len": 0}, "prompt_len is 0"),
    "temperature": ({"params": SamplingParams(-1.0)}, "temperature is -1.0"),
    "bias": ({"params": SamplingParams(logit_bias=((77, 1.0),))}, "token 77"),
}


@pytest.mark.parametrize(("changes", "named"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_item_is_refused_alone_and_named(
    verifier: Verifier, changes: dict[str, object], named: str
) -> None:
    good = Session("good", PROMPT, GREEDY)

    answers = verifier.submit([opening(**changes), good.item()])
    frame = verifier.step()

    assert [type(answer) for answer in answers] == [Refusal]
    assert answers[0].request_id == "bad"
    assert named in answers[0].message
    assert answers[0].code in ("protocol_error", "invalid_request_error")
    assert [verdict.request_id for verdict in frame.verdicts] == ["good"]
    assert len(verifier._sequences) == 1


def test_a_context_that_is_too_long_is_refused_by_the_step(
    verifier: Verifier, engine: ToyEngine
) -> None:
    long = Session("long", [1] * 70, GREEDY)
    good = Session("good", PROMPT, GREEDY)

    assert verifier.submit([long.item(), good.item()]) == []
    frame = verifier.step()

    assert [refusal.code for refusal in frame.refusals] == ["invalid_request_error"]
    assert [verdict.request_id for verdict in frame.verdicts] == ["good"]
    assert list(engine.contexts) == ["good"]


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

    assert [refusal.request_id for refusal in frame.refusals] == ["bad"]
    assert frame.refusals[0].code == "worker_error"
    assert "finite" in frame.refusals[0].message
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


def test_a_base_that_was_never_sent_is_a_miss(verifier: Verifier) -> None:
    unknown = Session("r", PROMPT, GREEDY)
    unknown.base_len = 3
    assert verifier.submit([unknown.item()]) == [CacheMiss("r", 0, 0)]

    session = Session("s", PROMPT, GREEDY)
    decode_all(verifier, [session], [no_drafts], 2)
    held = session.base_len
    session.tokens += [1, 2, 3]
    session.base_len = held + 3
    assert verifier.submit([session.item()]) == [CacheMiss("s", 0, held)]
    assert not verifier.has_pending


def test_another_prefix_is_a_miss_that_heals(verifier: Verifier, engine: ToyEngine) -> None:
    session = Session("r", PROMPT, GREEDY)
    decode_all(verifier, [session], [no_drafts], 3)
    plain = session.output
    engine.contexts["r"][1] = 7  # what the target holds is no longer what was committed

    decode_all(verifier, [session], [no_drafts], 8)

    assert session.num_misses == 1
    fresh = decode(Verifier(ToyEngine(hashed_law(VOCAB_SIZE), VOCAB_SIZE)), PROMPT, GREEDY)
    assert session.output[:8] == fresh[:8]
    assert session.output[:3] == plain


def test_an_item_sent_twice_is_answered_twice_with_the_same_words(verifier: Verifier) -> None:
    params = SamplingParams(0.9, frequency_penalty=0.5, seed=3)
    session = Session("r", PROMPT, params)
    decode_all(verifier, [session], [no_drafts], 4)
    item = session.item(random_drafts(1, VOCAB_SIZE)(PROMPT))

    verdicts = []
    for _ in range(2):
        assert verifier.submit([item]) == []
        verdicts.append(verifier.step().verdicts[0])

    assert verdicts[0].token_ids.tolist() == verdicts[1].token_ids.tolist()
    assert verdicts[0].context_len == verdicts[1].context_len


def test_a_second_item_before_the_first_answer_is_refused(verifier: Verifier) -> None:
    item = Session("r", PROMPT, GREEDY).item()

    answers = verifier.submit([item, item])

    assert [type(answer) for answer in answers] == [Refusal]
    assert "one at a time" in answers[0].message
    assert len(verifier.step().verdicts) == 1


def test_an_older_generation_is_refused_and_a_newer_one_takes_over(verifier: Verifier) -> None:
    old = Session("r", PROMPT, SamplingParams(1.0, seed=1), generation=1)
    new = Session("r", [2, 7], SamplingParams(1.0, seed=2), generation=2)
    verifier.submit([old.item()])

    taken = verifier.submit([new.item()])
    frame = verifier.step()
    stale = verifier.submit([old.item()])

    assert [(answer.generation, answer.code) for answer in taken] == [(1, "protocol_error")]
    assert "generation 2 took the request over" in taken[0].message
    assert [verdict.generation for verdict in frame.verdicts] == [2]
    assert frame.verdicts[0].context_len == 2
    assert "stale" in stale[0].message
    assert not verifier.has_pending


def test_a_malformed_takeover_does_not_harm_the_owner(verifier: Verifier) -> None:
    owner = Session("r", PROMPT, GREEDY)
    verifier.submit([owner.item()])

    answers = verifier.submit([opening("r", generation=5, params=SamplingParams(-1.0))])

    assert [answer.generation for answer in answers] == [5]
    assert [verdict.generation for verdict in verifier.step().verdicts] == [0]


def test_a_newer_generation_without_its_text_is_asked_for_all_of_it(verifier: Verifier) -> None:
    session = Session("r", PROMPT, GREEDY)
    decode_all(verifier, [session], [no_drafts], 3)
    session.generation = 1

    assert verifier.submit([session.item()]) == [CacheMiss("r", 1, 0)]


def test_another_prompt_length_is_refused(verifier: Verifier) -> None:
    session = Session("r", PROMPT, GREEDY)
    decode_all(verifier, [session], [no_drafts], 3)
    session.prompt_len = 4

    answers = verifier.submit([session.item()])

    assert "prompt_len is 4" in answers[0].message


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
        pages_in_use=2,
        pages_total=1000,
    )
