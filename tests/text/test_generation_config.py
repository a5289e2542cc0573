"""A checkpoint's sampling defaults and end-of-sequence tokens."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from cluster.core import SamplingParams
from cluster.text.generation_config import load_eos_token_ids, load_sampling_defaults
from tests.support.errors import config_error

QWEN = {
    "do_sample": True,
    "eos_token_id": [7, 9],
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "transformers_version": "4.37.0",
}
OPENAI = SamplingParams(max_tokens=0)


def folder_with(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_a_checkpoint_defines_sampling_defaults_and_end_tokens(tmp_path: Path):
    folder_with(tmp_path, **QWEN, min_p=0.05, max_new_tokens=2048)
    assert load_sampling_defaults(tmp_path) == SamplingParams(
        temperature=0.7, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.1, max_tokens=2048
    )
    assert load_eos_token_ids(tmp_path) == (7, 9)


def test_without_the_file_or_its_values_openais_defaults_apply(tmp_path: Path):
    assert load_sampling_defaults(tmp_path) == OPENAI
    assert load_sampling_defaults(folder_with(tmp_path, temperature=None, top_k=-1)) == OPENAI


def test_the_operator_may_choose_openais_defaults_or_another_folder(tmp_path: Path):
    model = folder_with(tmp_path / "model", **QWEN)
    other = folder_with(tmp_path / "other", temperature=0.3, eos_token_id=5)
    assert load_sampling_defaults(model, "none") == OPENAI
    assert load_eos_token_ids(model, "none") == (7, 9)
    assert load_sampling_defaults(model, str(other)).temperature == 0.3
    assert load_eos_token_ids(model, str(other)) == (5,)
    with config_error("'nowhere' has no "):
        load_sampling_defaults(model, "nowhere")


def test_unsupported_settings_of_a_checkpoint_are_logged_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    folder_with(tmp_path, **QWEN, num_beams=1, bad_words_ids=[], typical_p=1)
    load_sampling_defaults(tmp_path)
    folder_with(tmp_path, num_beams=4, no_repeat_ngram_size=3, stop_strings=["x"], do_sample=False)
    load_sampling_defaults(tmp_path, "none")
    assert not caplog.records
    load_sampling_defaults(tmp_path)
    assert caplog.messages[0].endswith(
        "not supported: do_sample, num_beams, no_repeat_ngram_size, stop_strings"
    )


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', not a number"),
        ({"temperature": True}, "temperature is True, not a number"),
        ({"top_k": 1.5}, "top_k is 1.5, not an integer"),
        ({"top_p": 2.0}, "top_p is 2.0"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ],
)
def test_a_value_that_cannot_be_used_names_the_file_and_the_remedy(
    tmp_path: Path, values: dict[str, Any], reason: str
):
    with config_error(reason) as caught:
        load_sampling_defaults(folder_with(tmp_path, **values))
    assert "set target.generation_config to none" in caught.value.message
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_not_an_object_is_refused(tmp_path: Path, text: str):
    (tmp_path / "generation_config.json").write_text(text)
    with config_error(r"generation_config.json: not"):
        load_sampling_defaults(tmp_path)
