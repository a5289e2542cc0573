"""The published folders are complete, small, and work together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cluster.train.acceptance import acceptance_lens, decode_transcripts
from cluster.train.corpus import KINDS, read_excerpts
from cluster.train.drafter import stop_ids
from cluster.train.evaluate import (
    TASK_DRAFTERS,
    divergences,
    encode_prompt,
    evaluate_divergence,
)
from cluster.train.networks import load
from cluster.train.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE

MODELS = Path(__file__).parents[2] / "models"
NAMES = ("demo-target", "demo-draft", "demo-draft-code", "demo-draft-prose")


def read_published_tokenizer(name: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODELS / name)


def test_all_folders_together_stay_small() -> None:
    num_bytes = sum(file.stat().st_size for name in NAMES for file in (MODELS / name).iterdir())
    assert num_bytes <= 40 * 2**20


@pytest.mark.parametrize("name", NAMES)
def test_folder_holds_the_ordinary_files_and_the_shared_vocabulary(name: str) -> None:
    assert sorted(file.name for file in (MODELS / name).iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    shared = (MODELS / "demo-target" / "tokenizer.json").read_bytes()
    assert (MODELS / name / "tokenizer.json").read_bytes() == shared
    assert json.loads((MODELS / name / "config.json").read_text())["vocab_size"] == VOCAB_SIZE


def test_published_vocabulary_has_exactly_its_stated_size() -> None:
    tokenizer = read_published_tokenizer("demo-target")
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_target_answers_a_chat_and_stops(dtype: torch.dtype) -> None:
    tokenizer = read_published_tokenizer("demo-target")
    network = AutoModelForCausalLM.from_pretrained(MODELS / "demo-target", dtype=dtype)
    asked = tokenizer.apply_chat_template(
        [
            {
                "role": "user",
                "content": "Write a Python function `is_even`: Whether a number is even.",
            }
        ],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = network.generate(**asked, max_new_tokens=48, do_sample=False)
    text = tokenizer.decode(answer[0, asked["input_ids"].shape[1] :])
    assert text.startswith("def is_even(")


def test_excerpts_are_many_short_and_licensed() -> None:
    excerpts = read_excerpts(MODELS / "heldout.jsonl")
    assert (MODELS / "heldout.jsonl").stat().st_size <= 400_000
    for kind in KINDS:
        assert sum(item.kind == kind for item in excerpts) >= 50
    assert all(20 <= len(item.text) <= 6000 for item in excerpts)
    assert {item.licence for item in excerpts} == {"PSF-2.0", "PostgreSQL"}


@pytest.mark.parametrize("kind", KINDS)
def test_drafters_are_accepted_on_held_out_text(kind: str) -> None:
    tokenizer = read_published_tokenizer("demo-target")
    excerpts = [item for item in read_excerpts(MODELS / "heldout.jsonl") if item.kind == kind]
    prompts = [encode_prompt(tokenizer, item.text)[-128:] for item in excerpts[:8]]
    transcripts = decode_transcripts(load(MODELS / "demo-target"), prompts, 48, stop_ids(tokenizer))
    task_drafter = TASK_DRAFTERS["code" if kind == "code" else "prose"]
    for name in ("demo-draft", task_drafter):
        # Far below the published figures: few, short texts.  An untrained drafter stays near 1.
        lens = acceptance_lens(load(MODELS / name), transcripts)
        assert lens[lens == lens].mean() > 1.6, name


def test_each_task_drafter_is_closer_to_the_target_on_its_own_task() -> None:
    excerpts = read_excerpts(MODELS / "heldout.jsonl")
    few = [item for kind in KINDS for item in [x for x in excerpts if x.kind == kind][:16]]
    leads = {each.drafter: each.lead for each in evaluate_divergence(MODELS, few)}
    assert leads["demo-draft"].mean == 0.0
    for name in TASK_DRAFTERS.values():
        assert leads[name].low > 0.0, name


def test_a_network_does_not_diverge_from_itself() -> None:
    network = load(MODELS / "demo-draft")
    (nats,) = divergences(network, network, [[5, 6, 7, 8]])
    assert nats == pytest.approx(0.0, abs=1e-6)
