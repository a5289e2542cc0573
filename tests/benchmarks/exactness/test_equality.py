"""What counts as equal text, which prompts are asked, and when the check fails."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import httpx
import torch
from fastapi import FastAPI, Request
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.exactness.equality import differing, problems, reference, strip_end
from benchmarks.exactness.prompts import model_folder, prompts_of
from benchmarks.support.completions import acceptance, body_of, complete, token_ids
from benchmarks.support.options import DEMO_CONFIG
from benchmarks.support.record import ROOT
from tests.support.checkpoints import tiny_checkpoint


def options(**more: Any) -> argparse.Namespace:
    values = {"questions": None, "questions_per_category": None, "prompts": 6, "overrides": []}
    return argparse.Namespace(**{**values, "config": str(ROOT / DEMO_CONFIG), **more})


def row(equal: int, length: float | None) -> dict[str, Any]:
    return {"equal": equal, "of": 4, "mean acceptance length": length}


def test_the_end_token_is_no_text() -> None:
    assert strip_end([5, 2], [2]) == [5]
    assert strip_end([5, 2, 7], [2]) == [5, 2, 7]
    assert strip_end([], [2]) == []


def test_one_other_token_is_another_text() -> None:
    assert differing([[1, 2], [3], [4]], [[1, 2], [3, 3], [5]]) == [1, 2]


def test_a_text_that_differs_and_a_run_without_drafts_are_problems() -> None:
    assert problems({"off": row(4, None), "on": row(4, 2.0)}) == []
    assert problems({"off": row(4, None), "on": row(3, 2.0)}) == ["on: 1 of 4 texts differ"]
    assert problems({"on": row(4, None)}) == ["no draft was verified, so nothing was tested"]


def test_questions_are_asked_in_the_chat_template_and_other_prompts_are_cut(
    tmp_path: Path,
) -> None:
    path = tmp_path / "questions.jsonl"
    lines = [{"question_id": n, "category": "qa", "turns": [f"q{n}", "and?"]} for n in range(4)]
    path.write_text("\n".join(map(json.dumps, lines)))
    folder = model_folder(options())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = prompts_of(options(questions=path, questions_per_category=2), tokenizer, 0)
    texts = [tokenizer.decode(ids) for ids in asked]
    assert len(texts) == 2
    for text, number in zip(texts, (0, 2), strict=True):
        assert f"q{number}" in text
        assert "and?" not in text
        assert text != f"q{number}", "it stands in the template"
    held_out = prompts_of(options(), tokenizer, 40)
    assert [len(ids) for ids in held_out] == [5, 14, 40, 5, 14, 40]


def test_the_reference_goes_on_greedily_to_the_limit_or_the_end(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama", tmp_path / "tiny"))
    (text,) = reference(model, [[5, 6, 7]], 4)
    ids = [5, 6, 7]
    for expected in text:
        logits = model(torch.tensor([ids])).logits
        assert int(logits[0, -1].argmax()) == expected
        ids.append(expected)
    assert 1 <= len(text) <= 4


def test_acceptance_counts_steps_that_verified_drafts() -> None:
    def answer(steps: int, accepted: int) -> dict[str, Any]:
        stats = {"num_spec_steps": steps, "num_accepted_draft_tokens": accepted}
        return {"metrics": {"speculative_decoding": stats}, "choices": [{"token_ids": [3]}]}

    assert acceptance([answer(0, 0), answer(4, 6)]) == 2.5
    assert acceptance([answer(0, 0)]) is None
    assert token_ids(answer(0, 0)) == [3]


async def test_answers_come_in_the_order_of_their_questions() -> None:
    app = FastAPI()

    @app.post("/v1/completions")
    async def echo(request: Request) -> dict[str, Any]:
        return {"choices": [{"token_ids": (await request.json())["prompt"]}]}

    class Toy:
        def client(self) -> httpx.AsyncClient:
            return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://t")

    bodies = [body_of("m", [number], 2) for number in range(9)]
    answers = await complete(Toy(), bodies, 4)  # type: ignore[arg-type]
    assert [token_ids(answer) for answer in answers] == [[number] for number in range(9)]
