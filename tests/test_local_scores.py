"""A given output is scored: its log-probabilities are transformers', however it is cut up."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.config.schema import Config, DrafterConfig
from cluster.core import FinishReason, SamplingParams, SpeculationOptions, TokenLogprob
from cluster.errors import RequestError
from cluster.local import LLM, Completion
from tests.support.local_models import drafting, ids_of, target

NUM_TOP = 4
TOLERANCE = 1e-4  # float32 on both sides, sums in another order


def tokens_of(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 200, length)]


# A quarter of the 128 rows of `target`, and the token that follows them.
ROWS = 128 // 4 + 1
# Many chunks, chunks that are all full, and one token.
TEXTS = (tokens_of(300, 1), tokens_of(1 + 3 * ROWS, 2), tokens_of(2, 3))


@pytest.fixture(scope="module")
def folder(checkpoint_factory) -> Path:  # type: ignore[no-untyped-def]
    return Path(checkpoint_factory("llama", max_position_embeddings=1024))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(drafting(folder, {"lookup": DrafterConfig(kind="prompt_lookup")})) as opened:
        yield opened


def scored(
    llm: LLM, text: Sequence[int], num_given: int = 1, speculation: SpeculationOptions | None = None
) -> Completion:
    forced = tuple(text[num_given:])
    params = SamplingParams(
        temperature=0.0, max_tokens=len(forced), forced_ids=forced, logprobs=NUM_TOP
    )
    (completion,) = llm.generate([list(text[:num_given])], params, speculation=speculation)
    assert completion.token_ids == list(forced)
    assert completion.finish_reason is FinishReason.LENGTH
    return completion


def laws_of(folder: Path, text: Sequence[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return torch.as_tensor(model(torch.tensor([text])).logits[0].log_softmax(dim=1))


def check(found: Sequence[TokenLogprob], laws: torch.Tensor, text: Sequence[int]) -> None:
    """found: of the last tokens of the text."""
    first = len(text) - len(found)
    for position, one in enumerate(found, first):
        law = laws[position - 1]
        assert one.logprob == pytest.approx(float(law[text[position]]), abs=TOLERANCE)
        values = [value for _, value in one.top]
        assert values == pytest.approx(law.topk(NUM_TOP).values.tolist(), abs=TOLERANCE)
        for token, value in one.top:
            assert value == pytest.approx(float(law[token]), abs=TOLERANCE)
        above = int((law > law[text[position]] + TOLERANCE).sum())
        below = int((law > law[text[position]] - TOLERANCE).sum())
        assert above + 1 <= one.rank <= below


@pytest.mark.parametrize("text", TEXTS, ids=len)
@pytest.mark.parametrize("enabled", [True, False], ids=["drafts", "plain"])
def test_scores_are_those_of_transformers(llm: LLM, folder: Path, text: list[int], enabled: bool):
    completion = scored(llm, text, speculation=SpeculationOptions(enabled=enabled))
    assert len(completion.logprobs) == len(text) - 1
    check(completion.logprobs, laws_of(folder, text), text)
    # What was given was not drafted, and a step took many rows of it.
    assert completion.stats.num_draft_tokens == 0
    assert completion.stats.num_steps == -(-(len(text) - 1) // ROWS)


def test_scores_beside_texts_that_are_written_are_the_same(llm: LLM, folder: Path):
    greedy = SamplingParams(temperature=0.0, max_tokens=60)
    prompts = [tokens_of(30, seed) for seed in (5, 6)]
    alone = ids_of(llm.generate(prompts, greedy, ignore_eos=True))
    with ThreadPoolExecutor(5) as pool:
        written = pool.submit(llm.generate, prompts, greedy, ignore_eos=True)
        found = list(pool.map(lambda text: scored(llm, text), TEXTS))
        assert ids_of(written.result()) == alone
    for text, completion in zip(TEXTS, found, strict=True):
        check(completion.logprobs, laws_of(folder, text), text)


def test_scores_survive_that_pages_run_out(folder: Path):
    """Pages for little more than one text: the others lose theirs in between, again and again."""
    config = Config(target=target(folder, num_pages=24))
    with LLM(config) as llm, ThreadPoolExecutor(3) as pool:
        texts = [tokens_of(300, seed) for seed in (7, 8, 9)]
        found = list(pool.map(lambda text: scored(llm, text), texts))
    for text, completion in zip(texts, found, strict=True):
        check(completion.logprobs, laws_of(folder, text), text)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(forced_ids=(5, 6), max_tokens=3), "forced_ids are 2 tokens"),
        (SamplingParams(forced_ids=(5, 10**6), max_tokens=2), "forced_ids names token 1000000"),
    ],
)
def test_an_output_that_cannot_be_scored_is_refused(llm: LLM, params: SamplingParams, message: str):
    with pytest.raises(RequestError, match=message):
        llm.generate([[5]], params)
