"""Adapters over HTTP: the request's `model` chooses one."""

import dataclasses
from pathlib import Path

import httpx
import pytest

from cluster.client import GenerateRequest
from cluster.core import token_array
from cluster.errors import NotFoundError
from deployments.ingress.grpc_request import to_spec
from deployments.ingress.openai_request import Chat, CompletionBody
from tests.deployments.conftest import ADAPTER, Served
from tests.deployments.test_openai_request import LIMITS, chat, completion
from tests.support.deployments.api import MODEL
from tests.support.engine.adapters import merged_oracle
from tests.support.engine.driver import generate, load_oracle

PROMPT = [9, 8, 7, 6, 5] * 8
GREEDY = {
    "prompt": PROMPT,
    "temperature": 0,
    "max_tokens": 16,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.mark.parametrize("enabled", [True, False], ids=["drafts", "plain"])
def test_the_model_field_chooses_the_adapter(
    served: Served, adapter_folder: Path, *, enabled: bool
):
    models = {
        MODEL: load_oracle(served.target_folder),
        ADAPTER: merged_oracle(served.target_folder, adapter_folder),
    }
    texts = {name: generate(each, token_array(PROMPT), 16) for name, each in models.items()}
    assert texts[MODEL] != texts[ADAPTER]
    # Twice each, by turns: what one has cached is of no use to the other.
    for name in (MODEL, ADAPTER) * 2:
        asked = {"model": name, **GREEDY, "speculation": {"enabled": enabled}}
        answer = served.api.ask("/v1/completions", **asked)
        assert answer["model"] == name
        assert answer["choices"][0]["token_ids"] == texts[name]


def test_the_models_are_listed_with_their_parent(served: Served):
    cards = httpx.get(f"{served.http}/v1/models", timeout=60).json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [(MODEL, None), (ADAPTER, MODEL)]
    one = httpx.get(f"{served.http}/v1/models/{ADAPTER}", timeout=60).json()
    assert one["parent"] == MODEL


def test_the_model_names_the_adapter():
    limits = dataclasses.replace(LIMITS, adapters={"sql": "sql@1", "demo/pirate": "demo/pirate@2"})
    for parse, make in ((CompletionBody.parse, completion), (Chat.parse, chat)):
        assert parse(make(), limits).spec.adapter == ""
        assert parse(make(model="demo/pirate"), limits).spec.adapter == "demo/pirate@2"
        with pytest.raises(NotFoundError, match="'demo' or 'sql' or 'demo/pirate'") as caught:
            parse(make(model="pirate"), limits)
        assert caught.value.param == "model"
    assert to_spec(GenerateRequest(model="sql", text="x"), limits).adapter == "sql@1"
