"""The beam search itself, over a law that is small enough to try every text."""

import itertools

import numpy as np
import pytest

from cluster.requests.fields import BeamSpec, EarlyStopping
from cluster.spec.beam_search import BeamSearch, Hypothesis

VOCAB_SIZE = 5
MAX_TOKENS = 4
STOP = 4


def law(prefix: tuple[int, ...]) -> np.ndarray:
    """float32[vocab]: log-probabilities after `prefix`."""
    seed = sum((token + 1) * (VOCAB_SIZE + 1) ** place for place, token in enumerate(prefix))
    logits = np.random.default_rng(seed).normal(0.0, 1.5, VOCAB_SIZE)
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def tokens_of(one: Hypothesis) -> tuple[int, ...]:
    return tuple(beam.token_id for beam in one.beam.lineage())


def search(spec: BeamSpec, max_tokens: int = MAX_TOKENS) -> BeamSearch:
    found = BeamSearch(spec, max_tokens, (STOP,))
    while not found.is_done:
        texts = [tuple(each.token_id for each in beam.lineage()) for beam in found.beams] or [()]
        laws = np.stack([law(text) for text in texts])
        order = np.argsort(-laws, axis=1, kind="stable")[:, : found.num_candidates]
        found.advance(order.astype(np.int32), np.take_along_axis(laws, order, axis=1))
    return found


def every_text(length_penalty: float) -> list[tuple[float, tuple[int, ...]]]:
    """All texts of the law with their scores, the best first."""
    scored = []
    for length in range(1, MAX_TOKENS + 1):
        for text in itertools.product(range(VOCAB_SIZE), repeat=length):
            if STOP in text[:-1] or (text[-1] != STOP and length < MAX_TOKENS):
                continue
            total = sum(law(text[:place])[token] for place, token in enumerate(text))
            scored.append((float(total) / length**length_penalty, text))
    return sorted(scored, reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
def test_a_search_that_is_wide_enough_finds_the_best_of_all_texts(length_penalty: float):
    width = VOCAB_SIZE**MAX_TOKENS
    found = search(BeamSpec(width, length_penalty, "never")).hypotheses
    expected = every_text(length_penalty)
    assert [tokens_of(one) for one in found[:20]] == [text for _, text in expected[:20]]
    scores = [score for score, _ in expected[:20]]
    assert np.allclose([one.score for one in found[:20]], scores, atol=1e-5)


def test_one_beam_is_greedy_decoding_that_ends_at_the_stop_token():
    text = ()
    while len(text) < 12 and (not text or text[-1] != STOP):
        text = (*text, int(law(text).argmax()))
    found = search(BeamSpec(1, early_stopping=True), max_tokens=12)
    assert [tokens_of(one) for one in found.hypotheses] == [text]
    assert found.hypotheses[0].is_stopped == (text[-1] == STOP)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_texts_come_ordered_and_as_many_as_beams(early_stopping: EarlyStopping):
    found = search(BeamSpec(3, 1.0, early_stopping), max_tokens=8).hypotheses
    scores = [float(one.score) for one in found]
    assert len(found) == 3
    assert scores == sorted(scores, reverse=True)
    assert len({tokens_of(one) for one in found}) == 3
    for one in found:
        assert one.is_stopped == (tokens_of(one)[-1] == STOP)
        assert STOP not in tokens_of(one)[:-1]


def test_stopping_early_takes_the_first_texts_and_never_stopping_the_best(
    monkeypatch: pytest.MonkeyPatch,
):
    early, never = (search(BeamSpec(1, 2.0, each), 8).hypotheses for each in (True, "never"))
    monkeypatch.setattr(BeamSearch, "_can_improve", lambda _: True)
    to_the_end = search(BeamSpec(1, 2.0), 8).hypotheses
    assert [*map(tokens_of, never)] == [*map(tokens_of, to_the_end)] != [*map(tokens_of, early)]


def test_alternatives_are_kept_where_they_were_asked_for():
    asked = BeamSearch(BeamSpec(2), 1, (STOP,), num_logprobs=2)
    order = np.argsort(-law(()), kind="stable")[None]
    asked.advance(order.astype(np.int32), law(())[order])
    best = asked.hypotheses[0].beam
    assert best.chosen.logprob == pytest.approx(float(law(()).max()))
    assert [token for token, _ in best.chosen.top] == order[0, :2].tolist()
    assert search(BeamSpec(2)).hypotheses[0].beam.chosen is None
