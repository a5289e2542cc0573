"""The published folders are complete, small, and work together."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cluster.train.compare import compare, drafters_of, read_questions
from models.recipe.corpus import KINDS, SPECIAL_TOKENS, VOCAB_SIZE, Kind
from models.recipe.demo import DistillationLoss, load
from tests.support.choices import by_day, by_night

MODELS = Path(__file__).parents[2] / "models"
NAMES = ("demo-target", "demo-draft", "demo-draft-code", "demo-draft-prose")
TASK_DRAFTERS: dict[Kind, str] = {"code": "demo-draft-code", "prose": "demo-draft-prose"}


def read_published_tokenizer(name: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODELS / name)


def excerpts(kind: Kind) -> list[dict[str, str]]:
    lines = (MODELS / "heldout.jsonl").read_text("utf-8").splitlines()
    return [each for line in lines if (each := json.loads(line))["kind"] == kind]


def test_all_folders_together_stay_small():
    num_bytes = sum(file.stat().st_size for name in NAMES for file in (MODELS / name).iterdir())
    assert num_bytes <= 40 * 2**20


@pytest.mark.parametrize("name", NAMES)
def test_folder_holds_the_ordinary_files_and_the_shared_vocabulary(name: str):
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


def test_published_vocabulary_has_exactly_its_stated_size():
    tokenizer = read_published_tokenizer("demo-target")
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(5))


def test_target_answers_a_chat_and_stops():
    tokenizer = read_published_tokenizer("demo-target")
    network = AutoModelForCausalLM.from_pretrained(MODELS / "demo-target", dtype=torch.float32)
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


def test_excerpts_are_many_short_and_licensed():
    assert (MODELS / "heldout.jsonl").stat().st_size <= 400_000
    for kind in KINDS:
        assert len(excerpts(kind)) >= 50
        assert all(20 <= len(each["text"]) <= 6000 for each in excerpts(kind))
        assert {each["licence"] for each in excerpts(kind)} <= {"PSF-2.0", "PostgreSQL"}


@by_night
def test_drafters_are_accepted_on_held_out_text():
    target = str(MODELS / "demo-target")
    drafters = drafters_of(target, MODELS.glob("demo-*/"))
    assert set(drafters) == {"suffix", "demo-draft", *TASK_DRAFTERS.values()}
    questions = read_questions(MODELS / "heldout.jsonl", per_task=2)
    chosen = {name: each for name, each in drafters.items() if name != "suffix"}
    for name, by_task in compare(target, chosen, questions).items():
        # Few, short texts.  An untrained drafter stays near 1.
        mean = sum(each.tokens_per_step for each in by_task.values()) / len(by_task)
        assert mean > 1.6, name


@torch.no_grad()
@pytest.mark.parametrize("kind", by_day(KINDS[:1], KINDS))
def test_each_task_drafter_is_closer_to_the_target_on_its_own_task(kind: Kind):
    tokenizer, target = read_published_tokenizer("demo-target"), load(MODELS / "demo-target")
    losses = [
        DistillationLoss(load(MODELS / name), target)
        for name in ("demo-draft", TASK_DRAFTERS[kind])
    ]
    leads: list[float] = []
    for excerpt in excerpts(kind)[:16]:
        ids = tokenizer.encode(excerpt["text"], add_special_tokens=False)[-1024:]
        general, task = (float(loss(torch.tensor([[*ids, 0]]))) for loss in losses)
        leads.append(general - task)
    # Two standard errors of the mean.
    assert np.mean(leads) > 2 * np.std(leads) / len(leads) ** 0.5
