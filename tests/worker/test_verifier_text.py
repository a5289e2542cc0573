"""The verifier's text depends on the target, the prompt, the parameters and the seed alone."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.core import SamplingParams
from cluster.worker.verifier import Verifier
from tests.support.choices import by_day
from tests.support.worker.rounds import (
    Session,
    chain_of_the_truth,
    decode,
    decode_all,
    half_right,
    random_drafts,
)
from tests.support.worker.toy_engine import ToyEngine, hashed_law

VOCAB_SIZE = 12
PROMPT = [3, 1, 4, 1, 5]

OPTIONS = {
    "greedy": SamplingParams(0.0),
    "T0.7": SamplingParams(0.7, seed=11),
    "T1": SamplingParams(1.0, seed=2**64 - 3),
    "stream": SamplingParams(1.0, seed=11, stream=2),
    "top_p": SamplingParams(1.0, top_p=0.9, seed=5),
    "top_k": SamplingParams(1.3, top_k=5, seed=5),
    "min_p": SamplingParams(1.0, min_p=0.05, seed=5),
    "all filters": SamplingParams(0.9, 0.95, 8, 0.02, seed=6),
    "penalties": SamplingParams(0.8, 1.0, 0, 0.0, 0.8, 0.6, 1.3, seed=7),
    "greedy penalties": SamplingParams(0.0, 1.0, 0, 0.0, 0.8, 0.6, 1.3),
    "bias": SamplingParams(0.7, logit_bias=((2, 3.0), (7, -100.0)), seed=8),
    "min_tokens": SamplingParams(1.0, min_tokens=9, stop_token_ids=(0, 1, 2), seed=9),
    "everything": SamplingParams(
        0.9, 0.9, 9, 0.01, 0.3, 0.2, 1.1, ((4, 1.5),), 10, 0, 16, 6, (0, 3), 2
    ),
}


def verifier() -> Verifier:
    return Verifier(ToyEngine(vocab_size=VOCAB_SIZE))


@pytest.mark.parametrize("params", OPTIONS.values(), ids=OPTIONS.keys())
def test_any_tree_gives_the_text_of_plain_decoding(params: SamplingParams) -> None:
    plain = decode(verifier(), PROMPT, params, num_tokens=40)
    text = PROMPT + plain

    drafters = [
        chain_of_the_truth(text),
        *(half_right(text, seed, VOCAB_SIZE) for seed in range(by_day(2, 4))),
        *(random_drafts(seed, VOCAB_SIZE) for seed in range(by_day(1, 3))),
    ]
    for drafter in drafters:
        assert decode(verifier(), PROMPT, params, drafter, 40) == plain


def test_a_batch_of_different_laws_gives_each_request_its_own_text() -> None:
    alone = {name: decode(verifier(), PROMPT, params) for name, params in OPTIONS.items()}
    sessions = [Session(name, PROMPT, params) for name, params in OPTIONS.items()]
    drafters = [
        half_right(PROMPT + alone[name], seed, VOCAB_SIZE) for seed, name in enumerate(OPTIONS)
    ]

    decode_all(verifier(), sessions, drafters, 20)

    assert {session.request_id: session.output[:20] for session in sessions} == alone


def test_right_drafts_are_accepted_whole() -> None:
    params = OPTIONS["everything"]
    text = PROMPT + decode(verifier(), PROMPT, params, num_tokens=36)
    session = Session("r", PROMPT, params)

    decode_all(verifier(), [session], [chain_of_the_truth(text)], 30)

    assert len(session.verdicts) == 5
    assert all(verdict.path.tolist() == [0, 1, 2, 3, 4] for verdict in session.verdicts)


@pytest.mark.parametrize("params", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_request_that_moves_to_another_target_goes_on_with_the_same_text(
    params: SamplingParams,
) -> None:
    plain = decode(verifier(), PROMPT, params)
    session = Session("r", PROMPT, params, written=plain[:7])

    decode_all(verifier(), [session], [random_drafts(1, VOCAB_SIZE)], 20)

    assert session.output[:20] == plain


@pytest.mark.parametrize("min_tokens", [1, 9])
def test_stop_tokens_are_impossible_until_min_tokens_are_out(min_tokens: int) -> None:
    early, late = [], []
    for seed in range(6):
        params = SamplingParams(
            1.5, min_tokens=min_tokens, stop_token_ids=tuple(range(6)), seed=seed
        )
        drafter = random_drafts(seed, VOCAB_SIZE)
        output = decode(verifier(), PROMPT, params, drafter, num_tokens=30)
        early += output[:min_tokens]
        late += output[min_tokens:]

    assert min(early) >= 6
    assert min(late) < 6


def test_different_seeds_and_streams_give_different_texts() -> None:
    texts = {
        tuple(decode(verifier(), PROMPT, SamplingParams(1.0, seed=seed, stream=stream)))
        for seed in range(4)
        for stream in range(3)
    }

    assert len(texts) == 12


def test_log_probabilities_are_those_of_the_raw_law() -> None:
    params = SamplingParams(
        0.7, 0.5, 3, repetition_penalty=1.5, logit_bias=((4, 5.0),), seed=3, logprobs=3
    )
    law = hashed_law(VOCAB_SIZE)
    session = Session("r", PROMPT, params)
    plain = decode(verifier(), PROMPT, params, num_tokens=12)

    decode_all(verifier(), [session], [half_right(PROMPT + plain, 0, VOCAB_SIZE)], 12)

    entries = [entry for verdict in session.verdicts for entry in verdict.logprobs]
    assert len(entries) == len(session.output)
    for index, (token, entry) in enumerate(zip(session.output, entries, strict=True)):
        row = law(PROMPT + session.output[:index]).astype(np.float64)
        expected = row - np.log(np.exp(row).sum())
        assert entry.logprob == pytest.approx(expected[token], abs=1e-5)
        assert [t for t, _ in entry.top] == np.argsort(-expected)[:3].tolist()
        assert [p for _, p in entry.top] == pytest.approx(np.sort(-expected)[:3] * -1, abs=1e-5)


def test_bias_is_added_before_the_repetition_penalty_as_in_vllm() -> None:
    """Token 1 stands in the prompt: (-1 + 3) / 1.25 = 1.6, but -1 * 1.25 + 3 = 1.75."""
    logits = np.full(VOCAB_SIZE, -9.0, dtype=np.float32)
    logits[1], logits[6] = -1.0, 1.7
    target = Verifier(ToyEngine(lambda context: logits, VOCAB_SIZE))
    params = SamplingParams(0.0, repetition_penalty=1.25, logit_bias=((1, 3.0),))

    assert decode(target, PROMPT, params, num_tokens=1) == [6]
