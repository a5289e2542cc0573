"""The verifier's text depends on the target, the prompt, the parameters and the seed alone."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from cluster.core import SamplingParams, TokenTree
from cluster.engine.engine import Engine
from cluster.errors import WorkerError
from cluster.rpc.messages import StepReport
from cluster.worker.verifier import Verifier
from tests.support.choices import by_day
from tests.support.engine.driver import load_engine, prompt
from tests.support.worker.rounds import (
    Session,
    chain_of_the_truth,
    decode,
    decode_all,
    drafters_around,
    half_right,
    no_drafts,
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


@pytest.mark.parametrize("params", OPTIONS.values(), ids=OPTIONS)
def test_any_tree_gives_the_text_of_plain_decoding(params: SamplingParams):
    plain = decode(verifier(), PROMPT, params, num_tokens=40)

    for drafter in drafters_around(PROMPT + plain, VOCAB_SIZE, by_day(2, 4)):
        assert decode(verifier(), PROMPT, params, drafter, 40) == plain


def test_a_batch_of_different_laws_gives_each_request_its_own_text():
    alone = {name: decode(verifier(), PROMPT, params) for name, params in OPTIONS.items()}
    sessions = [Session(name, PROMPT, params) for name, params in OPTIONS.items()]
    drafters = [
        half_right(PROMPT + alone[name], seed, VOCAB_SIZE) for seed, name in enumerate(OPTIONS)
    ]

    decode_all(verifier(), sessions, drafters, 20)

    assert {session.request_id: session.output[:20] for session in sessions} == alone


def test_right_drafts_are_accepted_whole():
    params = OPTIONS["everything"]
    text = PROMPT + decode(verifier(), PROMPT, params, num_tokens=36)
    session = Session("r", PROMPT, params)

    decode_all(verifier(), [session], [chain_of_the_truth(text)], 30)

    assert len(session.verdicts) == 5
    assert all(verdict.path.tolist() == [0, 1, 2, 3, 4] for verdict in session.verdicts)


@pytest.mark.parametrize("params", OPTIONS.values(), ids=OPTIONS)
def test_a_request_that_moves_to_another_target_goes_on_with_the_same_text(
    params: SamplingParams,
):
    plain = decode(verifier(), PROMPT, params)
    session = Session("r", PROMPT, params, written=plain[:7])

    decode_all(verifier(), [session], [random_drafts(1, VOCAB_SIZE)], 20)

    assert session.output[:20] == plain


@pytest.mark.parametrize("min_tokens", [1, 9])
def test_stop_tokens_are_impossible_until_min_tokens_are_out(min_tokens: int):
    early, late = [], []
    for seed in range(6):
        params = SamplingParams(
            1.5, min_tokens=min_tokens, stop_token_ids=(*range(6), VOCAB_SIZE), seed=seed
        )
        drafter = random_drafts(seed, VOCAB_SIZE)
        output = decode(verifier(), PROMPT, params, drafter, num_tokens=30)
        early += output[:min_tokens]
        late += output[min_tokens:]

    assert min(early) >= 6
    assert min(late) < 6


def test_different_seeds_and_streams_give_different_texts():
    texts = {
        tuple(decode(verifier(), PROMPT, SamplingParams(1.0, seed=seed, stream=stream)))
        for seed in range(4)
        for stream in range(3)
    }

    assert len(texts) == 12


def test_log_probabilities_are_those_of_the_raw_law():
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


def test_bias_is_added_before_the_repetition_penalty_as_in_vllm():
    """Token 1 stands in the prompt: (-1 + 3) / 1.25 = 1.6, but -1 * 1.25 + 3 = 1.75."""
    logits = np.full(VOCAB_SIZE, -9.0, np.float32)
    logits[1], logits[6] = -1.0, 1.7
    target = Verifier(ToyEngine(lambda context: logits, VOCAB_SIZE))
    params = SamplingParams(0.0, repetition_penalty=1.25, logit_bias=((1, 3.0),))

    assert decode(target, PROMPT, params, num_tokens=1) == [6]


# The verifier on the real engine: with any drafts the text of plain decoding.


NUM_TOKENS = 24


@pytest.fixture(
    scope="module",
    params=by_day(
        ["mistral-sliding", "qwen3-moe"],
        ["qwen3", "mistral-sliding", "mixtral", "qwen3-moe", "phi3", "starcoder2"],
    ),
)
def other(request: pytest.FixtureRequest, checkpoint_factory: Callable[..., Path]) -> Engine:
    return load_engine(checkpoint_factory(request.param))


@pytest.mark.parametrize("name", ["greedy", "top_p", "everything"])
def test_other_architectures_keep_their_text_too(other: Engine, name: str):
    verifier = Verifier(other)
    plain = decode(verifier, PROMPT, OPTIONS[name], num_tokens=NUM_TOKENS + 5)

    for drafter in drafters_around(PROMPT + plain, other.vocab_size):
        assert decode(verifier, PROMPT, OPTIONS[name], drafter, NUM_TOKENS) == plain[:NUM_TOKENS]


def test_preempted_requests_are_sent_again_and_keep_their_text(
    llama_folder: Path,
):
    engine = load_engine(llama_folder)
    names = ["greedy", "top_p", "penalties", "everything"]
    prompts = [prompt(8 + 3 * index, seed=index).tolist() for index in range(len(names))]
    plain = [
        decode(Verifier(engine), ids, OPTIONS[name], num_tokens=NUM_TOKENS)
        for ids, name in zip(prompts, names, strict=True)
    ]
    # Twenty pages of four tokens hold one or two of the four texts.
    small = load_engine(llama_folder, num_pages=20, prefix_cache=False)
    sessions = [Session(name, ids, OPTIONS[name]) for ids, name in zip(prompts, names, strict=True)]
    drafters = [
        half_right(ids + text, seed, engine.vocab_size)
        for seed, (ids, text) in enumerate(zip(prompts, plain, strict=True))
    ]

    decode_all(Verifier(small), sessions, drafters, NUM_TOKENS, release=True)

    assert [session.output[:NUM_TOKENS] for session in sessions] == plain
    assert sum(session.num_misses for session in sessions) > 0
    assert small.pages_in_use == 0


# A fault of one text stays with that text.


GREEDY = SamplingParams(0.0)


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine(vocab_size=VOCAB_SIZE, max_context_len=64)


@pytest.fixture
def target(engine: ToyEngine) -> Verifier:
    return Verifier(engine)


def without_numbers(place: int, token: int) -> Verifier:
    """One whose model says NaN where the context has that token at that place."""
    sound = hashed_law(VOCAB_SIZE)

    def law(context: Sequence[int]) -> np.ndarray:
        return sound(context) * (np.nan if context[place] == token else 1.0)

    return Verifier(ToyEngine(law, VOCAB_SIZE))


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(0.8, 0.9, seed=1), SamplingParams(0.0, repetition_penalty=2.0)],
)
def test_logits_of_nan_refuse_their_item_alone(params: SamplingParams):
    target = without_numbers(0, 9)
    good, bad = Session("good", PROMPT, params), Session("bad", [9, 1], params)
    tree = TokenTree.chain([1, 2])

    target.submit([bad.item(tree), good.item(tree)])
    frame = target.step()

    assert {name: type(error) for name, error in frame.refused.items()} == {"bad": WorkerError}
    assert "finite" in frame.refused["bad"].message
    good.take(frame.verdicts[0])
    assert good.output == decode(verifier(), PROMPT, params, num_tokens=len(good.output))


def test_nan_behind_a_wrong_draft_does_not_reach_the_text():
    truth = int(hashed_law(VOCAB_SIZE)(PROMPT).argmax())
    wrong = (truth + 1) % VOCAB_SIZE
    target = without_numbers(-1, wrong)

    target.submit([Session("r", PROMPT, GREEDY).item(TokenTree.chain([wrong]))])

    assert target.step().verdicts[0].token_ids.tolist() == [truth]


def test_a_miss_heals_and_no_more_is_read_again_than_was_lost(target: Verifier, engine: ToyEngine):
    session = Session("r", PROMPT, GREEDY)
    decode_all(target, [session], [no_drafts], 3)
    engine.contexts["r"][1] = 7  # what the target holds is no longer what was committed

    decode_all(target, [session], [no_drafts], 8)

    assert session.num_misses == 1
    assert session.output == decode(verifier(), PROMPT, GREEDY, num_tokens=8)
    del engine.contexts["r"][4:]
    target.submit([session.item()])
    assert target.step().missed == ["r"]
    assert target.step().report.num_rows == len(PROMPT) + 8 - 4, "of what is left nothing"


def test_a_released_request_leaves_nothing_behind(target: Verifier, engine: ToyEngine):
    sessions = [Session(f"r{i}", PROMPT, GREEDY) for i in range(3)]
    decode_all(target, sessions, [no_drafts] * 3, 2)
    target.submit([session.item() for session in sessions])

    target.release(["r0", "r1", "never known"])
    frame = target.step()
    target.release(["r2"])

    assert [verdict.request_id for verdict in frame.verdicts] == ["r2"]
    assert engine.contexts == {}
    assert len(target._sequences) == 0


def test_the_report_counts_sequences_and_nodes_and_times_by_the_clock(engine: ToyEngine):
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


def test_a_tree_that_is_verified_again_has_the_same_verdict(target: Verifier):
    params = SamplingParams(0.9, frequency_penalty=0.5, seed=3)
    session = Session("r", PROMPT, params)
    decode_all(target, [session], [no_drafts], 4)
    item = session.item(random_drafts(1, VOCAB_SIZE)(PROMPT))

    verdicts = []
    for held_len in (session.record.held_len, session.record.held_len, 0):
        session.record.held_len = held_len
        assert target.submit([item]) == {}
        verdicts.append(target.step().verdicts[0])

    assert verdicts[2].token_ids.tolist() == verdicts[0].token_ids.tolist()
    assert verdicts[0].token_ids.tolist() == verdicts[1].token_ids.tolist()
    assert verdicts[0].context_len == verdicts[1].context_len
