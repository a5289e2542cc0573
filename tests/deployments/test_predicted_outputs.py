"""OpenAI's `prediction` through HTTP: it speeds an answer up, is counted alone, changes nothing."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config.schema import DrafterConfig, DrafterPlacement
from cluster.spec.params import MAX_PREDICTION_TOKENS
from tests.support.deployments.api import Json
from tests.support.deployments.server import Server, serving, tiny_config

CHAT = [{"role": "user", "content": "the same again, please"}]
ASKED = {"messages": CHAT, "max_tokens": 48, "ignore_eos": True}
SAMPLINGS = [{"temperature": 0}, {"temperature": 0.9, "seed": 4}]


@pytest.fixture(scope="module")
def predicting(llama_folder: Path) -> Iterator[Server]:
    config = tiny_config(llama_folder)
    prediction = DrafterConfig(kind="prediction", placement=DrafterPlacement(with_="target"))
    coordinator = replace(config.coordinator, max_draft_tokens=8)
    drafters = {"predicted": prediction}
    with serving(replace(config, drafters=drafters, coordinator=coordinator)) as running:
        yield running


def ask(server: Server, **body: Any) -> Json:
    return server.ask("/v1/chat/completions", **ASKED, **body)


def predicted(text: str) -> dict[str, str]:
    return {"type": "content", "content": text}


def text_of(answer: Json) -> str:
    return answer["choices"][0]["message"]["content"]


def counts(answer: Json) -> tuple[int, int]:
    details = answer["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_a_prediction_is_accepted_where_it_is_right_and_changes_no_text(
    predicting: Server, sampling: Json
):
    # A bias that makes the tiny model, which writes bytes, write letters.
    token_ids = predicting.ingress.tokenizer.encode("abcdefgh ").tolist()
    sampling = {**sampling, "logit_bias": {str(token): 40 for token in token_ids}}
    plain = ask(predicting, **sampling)
    assert counts(plain) == (0, 0)
    right = ask(predicting, **sampling, prediction=predicted(text_of(plain)))
    assert text_of(right) == text_of(plain)
    accepted, rejected = counts(right)
    steps = right["metrics"]["speculative_decoding"]
    # The draws after accepted drafts were predicted too, and never drafted.
    assert accepted == steps["accepted_by_drafter"]["predicted"] >= 36
    assert accepted + rejected == steps["num_draft_tokens"]
    assert steps["num_spec_steps"] <= 12
    # A wrong one is counted as rejected.
    parts = [{"type": "text", "text": "zyx"}, {"type": "text", "text": "wvu" * 40}]
    wrong = ask(predicting, **sampling, prediction={"type": "content", "content": parts})
    assert text_of(wrong) == text_of(plain)
    accepted, rejected = counts(wrong)
    assert accepted == 0
    assert rejected > 0


def test_where_nobody_drafts_from_it_the_answer_says_why(predicting: Server, server: Server):
    body = {"temperature": 0, "prediction": predicted("abc")}
    answer = ask(server, **body)
    assert counts(answer) == (0, 0)
    found = answer["metrics"]["speculative_decoding"]
    assert found["prediction_idle_because"] == "no_prediction_drafter"
    off = ask(predicting, **body, speculation={"enabled": False})
    assert off["metrics"]["speculative_decoding"]["prediction_idle_because"] == "disabled"
    on = ask(predicting, **body)
    assert "prediction_idle_because" not in on["metrics"]["speculative_decoding"]


def test_a_prediction_of_too_many_tokens_is_refused_by_name(predicting: Server):
    asked = {**ASKED, "prediction": predicted("a " * MAX_PREDICTION_TOKENS)}
    assert predicting.refusal("/v1/chat/completions", **asked)["param"] == "prediction"
