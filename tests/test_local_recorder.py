"""`LLM` with a recorder inside: the same texts, and what is recorded of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.config.schema import Config, DrafterConfig
from cluster.core import SpeculationOptions
from cluster.draft.recorded import Origin, RecordedAnswer, tenant_name
from cluster.local import LLM
from cluster.models.fingerprint import folder_tokenizer_hash, model_hash
from cluster.requests.fields import tenant_of
from tests.support.clock import wait_until
from tests.support.draft.recording import answers_in
from tests.support.local_models import (
    GREEDY,
    PLAIN,
    PROMPTS,
    SEEDED,
    drafters,
    drafting,
    target,
)


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
            for speculation in (SpeculationOptions(), PLAIN)
            for completion in llm.generate(
                PROMPTS, params, cache_salt=salt, speculation=speculation
            )
        ]


def test_texts_are_the_same_and_what_is_recorded_is_the_targets_law(
    checkpoint_factory: Callable[..., Path], tmp_path: Path
):
    folder = checkpoint_factory("llama")
    texts = texts_of(folder, tmp_path)
    assert texts == texts_of(folder, None)
    assert texts[: len(texts) // 2] == texts[len(texts) // 2 :], "a salt changes no text"
    origin = Origin(model_hash(folder), folder_tokenizer_hash(folder), 288)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = answers_in(tmp_path, len(texts), origin)
    assert len(answers) == len(texts)
    assert {each.name for each in tmp_path.iterdir()} == {
        tenant_name(tenant_of(salt)) for salt in (None, "secret")
    }
    assert any(len(each.rejected_token_ids) for each in answers)
    written = [text for text in texts if text]
    for answer in answers:
        # A text's stop token is recorded and is no part of it.
        assert any(answer.token_ids[: len(text)].tolist() == text for text in written)
        check_laws(model, answer)


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


def check_laws(model: torch.nn.Module, answer: RecordedAnswer) -> None:
    ids = np.concatenate([answer.prompt, answer.token_ids])
    with torch.no_grad():
        logits = model(torch.from_numpy(ids).long()[None]).logits[0, len(answer.prompt) - 1 : -1]
    laws = torch.log_softmax(logits.float(), -1)
    found = torch.gather(laws, 1, torch.from_numpy(answer.candidates).long())
    assert found.numpy() == pytest.approx(answer.log_probs.astype(np.float32), abs=2e-2)
