"""Options as vLLM's users type them become settings of ours, or errors that name the remedy."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config.schema import Config
from deployments.access import check_access
from deployments.asked import asked, with_api_keys
from deployments.command_line import parser_for
from tests.conftest import Run


def config(*arguments: str) -> Config:
    return asked(parsed(*arguments)).config


def parsed(*arguments: str) -> argparse.Namespace:
    command = ["serve", *arguments]
    return parser_for(command).parse_args(command)


def test_each_option_has_its_settings() -> None:
    words = (
        "--draft suffix --host :: --port 8123 --max-model-len 512 -tp 1 --dtype half "
        "--max-num-seqs 8 --gpu-memory-utilization 0.5 --max-num-batched-tokens 256 "
        "--served-model-name first 1 --log-format json"
    )
    found = config("demo-target", *words.split())
    engine = found.target.engine
    assert (found.http.host, found.http.port) == ("::", 8123)
    assert (engine.max_context_len, engine.tensor_parallel, engine.dtype) == (512, 1, "float16")
    assert (engine.memory_fraction, engine.max_batch_tokens) == (0.5, 256)
    assert engine.max_running_sequences == found.coordinator.max_running_sequences == 8
    assert (found.model_name, found.api.served_model_names) == ("first", ("1",))
    assert found.log_format == "json"


def test_an_option_of_vllm_is_taken_or_answered_with_what_to_write_instead(tmp_path: Path) -> None:
    adapter, template = str(tmp_path), tmp_path / "template.jinja"
    words = (
        "--draft suffix --tool-call-parser llama3_json --enable-auto-tool-choice "
        f"--reasoning-parser deepseek_r1 --enable-lora --lora-modules a={adapter} "
        "--data-parallel-size 2 --no-enable-prefix-caching --generation-config vllm "
        '--allowed-origins ["*"] --enable-chunked-prefill '
        "--otlp-traces-endpoint http://127.0.0.1:4318/v1/traces "
        f"--ssl-certfile {adapter} --ssl-keyfile {adapter} --chat-template {template}"
    )
    found = config("demo-target", *words.split())
    assert found.answers.chat_template == str(template)
    assert (found.answers.tool_parser, found.answers.reasoning_parser) == ("llama3", "think")
    assert (found.target.replicas, found.target.generation_config) == (2, "none")
    assert found.target.engine.adapters == {"a": adapter}
    assert not found.target.engine.prefix_cache
    assert found.api.cors_origins == ("*",)
    assert found.ingress.traces_url.endswith(":4318/v1/traces")
    assert (found.tls.cert_file, found.tls.key_file) == (adapter, adapter)


def test_they_hold_for_a_file_too_and_set_is_the_last_word() -> None:
    found = config("configs/tiny.yaml", "--port", "8123", "--set", "http.port=8124")
    assert found.http.port == 8124
    assert [*found.drafters] == ["lm", "code", "prose", "suffix", "ngram"]


@pytest.mark.parametrize(
    ("given", "name", "options"),
    [
        (
            {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
            "prompt_lookup",
            {"max_ngram": 4, "min_ngram": 2},
        ),
        ({"method": "suffix"}, "suffix", {}),
        (
            {"model": "demo-draft"},
            "lm",
            {"engine": {"model": "demo-draft", "memory_fraction": 0.1}},
        ),
        ({"method": "eagle3", "model": "a/b"}, "eagle3", {"model": "a/b"}),
        ({"method": "deepseek_mtp"}, "mtp", {"model": "demo-target"}),
    ],
)
def test_a_speculative_config_is_a_drafter(
    given: dict[str, Any], name: str, options: dict[str, Any]
) -> None:
    text = json.dumps({**given, "num_speculative_tokens": 3})
    found = config("demo-target", "--speculative-config", text)
    assert found.drafters[name].options == options
    assert found.coordinator.max_draft_tokens == 3


def test_an_api_key_is_kept_as_its_hash_alone(tmp_path: Path) -> None:
    arguments = parsed("demo-target", "--api-key", "secret-1", "secret-2")
    file = with_api_keys(asked(arguments), arguments, tmp_path)
    check_access(file.config)
    written = Path(file.config.access.keys_file).read_text()
    assert "secret" not in written
    assert [*yaml.safe_load(written)["keys"]] == ["key1", "key2"]


def test_an_api_key_is_for_a_server_whose_file_names_none(tmp_path: Path, run: Run) -> None:
    for more in (("--set", f"access.keys_file={tmp_path}/keys.yaml"), ("--address", "auto")):
        said = run("serve", "demo-target", "--api-key", "k", *more, status=2)
        assert "`drafthouse key NAME` makes an entry" in said


def test_a_model_is_checked_as_a_file_is(run: Run) -> None:
    said = run("check", "demo-target", "--draft", "demo-draft", "--draft", "suffix")
    assert "the tokenizers of target and 1 draft models are the same" in said
    assert "drafter lm: inside the target" in said
