"""What `LLM` tells of the target's laws is what transformers computes: the scores of a given
output, however it is cut up, and what a recorder writes beside texts that it does not change."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.config.schema import Config, DrafterConfig
from cluster.core import FinishReason, SamplingParams, SpeculationOptions
from cluster.draft.recorded import Origin, tenant_name
from cluster.local import LLM, Completion
from cluster.models.fingerprint import folder_tokenizer_hash, model_hash
from cluster.requests.fields import tenant_of
from tests.support.clock import wait_until
from tests.support.draft.recording import answers_in
from tests.support.engine.driver import laws_of, load_oracle, prompt
from tests.support.local_models import (
    GREEDY,
    PLAIN,
    PROMPTS,
    SEEDED,
    drafters,
    drafting,
    ids_of,
    target,
)

NUM_TOP = 4
TOLERANCE = 1e-4  # float32 on both sides, sums in another order


def tokens_of(length: int, seed: int) -> list[int]:
    return prompt(length, seed).tolist()


# A quarter of the 128 rows of `target`, and the token that follows them.
ROWS = 128 // 4 + 1
# Many chunks, chunks that are all full, and one token.
TEXTS = (tokens_of(300, 1), tokens_of(1 + 3 * ROWS, 2), tokens_of(2, 3))


@pytest.fixture(scope="module")
def llm(llama_folder: Path) -> Iterator[LLM]:
    with LLM(drafting(llama_folder, {"lookup": DrafterConfig(kind="prompt_lookup")})) as opened:
        yield opened


def scored(llm: LLM, text: list[int], speculation: SpeculationOptions | None = None) -> Completion:
    """What follows the first token."""
    first, *forced = text
    params = SamplingParams(
        temperature=0.0, max_tokens=len(forced), forced_ids=tuple(forced), logprobs=NUM_TOP
    )
    (completion,) = llm.generate([first], params, speculation=speculation)
    assert completion.token_ids == forced
    assert completion.finish_reason is FinishReason.LENGTH
    return completion


def check(found: Completion, folder: Path, text: list[int]) -> None:
    laws = laws_of(load_oracle(folder), text)
    for wanted, law, one in zip(text[1:], laws, found.logprobs, strict=True):
        assert one.logprob == pytest.approx(float(law[wanted]), abs=TOLERANCE)
        values = [value for _, value in one.top]
        assert values == pytest.approx(law.topk(NUM_TOP).values.tolist(), abs=TOLERANCE)
        for token, value in one.top:
            assert value == pytest.approx(float(law[token]), abs=TOLERANCE)
        above = int((law > law[wanted] + TOLERANCE).sum())
        below = int((law > law[wanted] - TOLERANCE).sum())
        assert above + 1 <= one.rank <= below


@pytest.mark.parametrize("text", TEXTS, ids=len)
@pytest.mark.parametrize("enabled", [True, False], ids=["drafts", "plain"])
def test_scores_are_those_of_transformers(
    llm: LLM, llama_folder: Path, text: list[int], enabled: bool
):
    completion = scored(llm, text, SpeculationOptions(enabled=enabled))
    check(completion, llama_folder, text)
    # What was given was not drafted, and a step took many rows of it.
    assert completion.stats.num_draft_tokens == 0
    assert completion.stats.num_steps == -(-(len(text) - 1) // ROWS)


def test_scores_beside_texts_that_are_written_are_the_same(llm: LLM, llama_folder: Path):
    prompts = [tokens_of(30, seed) for seed in (5, 6)]
    alone = ids_of(llm.generate(prompts, GREEDY, ignore_eos=True))
    with ThreadPoolExecutor(5) as pool:
        written = pool.submit(llm.generate, prompts, GREEDY, ignore_eos=True)
        found = list(pool.map(lambda text: scored(llm, text), TEXTS))
        assert ids_of(written.result()) == alone
    for text, completion in zip(TEXTS, found, strict=True):
        check(completion, llama_folder, text)


def test_scores_survive_that_pages_run_out(llama_folder: Path):
    """Pages for little more than one text: the others lose theirs in between, again and again."""
    config = Config(target=target(llama_folder, num_pages=24))
    with LLM(config) as llm, ThreadPoolExecutor(3) as pool:
        texts = [tokens_of(300, seed) for seed in (7, 8, 9)]
        found = list(pool.map(lambda text: scored(llm, text), texts))
    for text, completion in zip(texts, found, strict=True):
        check(completion, llama_folder, text)


def recording(folder: Path, **how: str) -> dict[str, Any]:
    """Options of a recorder."""
    return {"tenants": "all", "share": 1.0, "keep": "disk", "folder": str(folder), **how}


def texts_of(folder: Path, recorded: Path | None) -> list[list[int]]:
    """Greedy and seeded, with drafts and without, of two tenants."""
    found = drafters(folder)
    if recorded is not None:
        found["recorder"] = DrafterConfig("recorder", recording(recorded))
    with LLM(drafting(folder, found)) as llm:
        return [
            list(completion.token_ids)
            for salt in (None, "secret")
            for params in (GREEDY, SEEDED)
            for speculation in (None, PLAIN)
            for completion in llm.generate(
                PROMPTS, params, cache_salt=salt, speculation=speculation
            )
        ]


def test_texts_are_the_same_and_what_is_recorded_is_the_targets_law(
    llama_folder: Path, tmp_path: Path
):
    texts = texts_of(llama_folder, tmp_path)
    assert texts == texts_of(llama_folder, None)
    assert texts[: len(texts) // 2] == texts[len(texts) // 2 :], "a salt changes no text"
    origin = Origin(model_hash(llama_folder), folder_tokenizer_hash(llama_folder), 288)
    model = load_oracle(llama_folder)
    answers = answers_in(tmp_path, len(texts), origin)
    assert len(answers) == len(texts)
    assert {each.name for each in tmp_path.iterdir()} == {
        tenant_name(tenant_of(salt)) for salt in (None, "secret")
    }
    assert any(len(each.rejected_token_ids) for each in answers)
    for answer in answers:
        # A text's stop token is recorded and is no part of it.
        assert any(answer.token_ids[: len(text)].tolist() == text for text in texts if text)
        laws = laws_of(model, [*answer.prompt, *answer.token_ids])[len(answer.prompt) - 1 :]
        found = torch.gather(laws, 1, torch.from_numpy(answer.candidates).long())
        assert found.numpy() == pytest.approx(answer.log_probs.astype(np.float32), abs=2e-2)


def test_recording_is_stopped_while_the_target_runs(llama_folder: Path, tmp_path: Path):
    """What was recorded goes, and the rest of the drafters' options are as they were."""
    found = {"recorder": DrafterConfig("recorder", recording(tmp_path))}

    def tell(**how: str) -> None:
        options = recording(tmp_path, **how)
        llm.reconfigure({"drafters": {"recorder": {"options": options}}})

    with LLM(Config(target=target(llama_folder), drafters=found)) as llm:
        llm.generate(PROMPTS[:1], GREEDY)
        wait_until(lambda: len(list(tmp_path.rglob("*.npz"))) == 1)
        tell(tenants="none")
        wait_until(lambda: not list(tmp_path.rglob("*.npz")))
        (again,) = llm.generate(PROMPTS[:1], GREEDY)
        assert again.token_ids
        tell()
        llm.generate(PROMPTS[:1], GREEDY)
        wait_until(lambda: len(list(tmp_path.rglob("*.npz"))) == 1)
