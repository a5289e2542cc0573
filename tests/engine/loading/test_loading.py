"""From a configuration to an engine, or to an error that says what to change."""

import logging
import mmap
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cluster.config.schema import EngineConfig
from cluster.engine import device
from cluster.engine.cpu import kernels, threads
from cluster.engine.cpu.threads import configure_threads
from cluster.engine.device import num_cores
from cluster.engine.engine import Work
from cluster.engine.loading import progress
from cluster.engine.loading.inspection import describe
from cluster.engine.loading.model import load_model
from cluster.engine.loading.planned import planned
from cluster.errors import ConfigError
from cluster.models.fingerprint import folder_tokenizer_hash
from tests.conftest import said_by
from tests.support.architectures import EOS_TOKEN_ID, MAX_POSITIONS
from tests.support.choices import by_night
from tests.support.clock import wait_until
from tests.support.engine.altered import altered
from tests.support.engine.driver import (
    Factory,
    last_logits,
    load_engine,
    load_oracle,
    prompt,
    rows,
    run,
)
from tests.support.engine.native import needs_native
from tests.support.errors import config_error


def test_an_engine_states_its_identity_and_limits(llama_folder: Path):
    engine = load_engine(llama_folder)
    assert engine.vocab_size == 288
    assert engine.max_context_len == MAX_POSITIONS
    assert engine.eos_token_ids == (EOS_TOKEN_ID,)
    assert engine.device == torch.device("cpu")
    assert engine.tokenizer_hash == folder_tokenizer_hash(llama_folder)
    assert engine.pages_total == 256


def test_a_model_without_a_tokenizer_is_served_without_its_hash(llama_folder: Path, tmp_path: Path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(llama_folder / name, tmp_path / name)
    assert load_engine(tmp_path).tokenizer_hash == ""


def test_missing_weights_are_not_replaced_by_random_ones(llama_folder: Path, tmp_path: Path):
    lost = "model.layers.1.mlp.up_proj.weight"
    folder = altered(llama_folder, tmp_path / "incomplete", change=lambda own: own.pop(lost))
    with config_error(r"lacks 1 of its weights, model\.layers\.1\.mlp\.up"):
        load_engine(folder)


@pytest.mark.parametrize(
    ("settings", "param", "message"),
    [
        ({"device": "tpu"}, "device", "use auto, cpu"),
        ({"device": "meta"}, "device", "not supported"),
        ({"device": "cuda:99"}, "device", "does not exist"),
        ({"attention": "flash"}, "attention", "auto or one of"),
        ({"max_context_len": 513}, "max_context_len", "own limit of 512"),
        ({"max_context_len": 4}, "max_context_len", "at least 16"),
        ({"num_pages": 3}, "num_pages", "at least 4"),
        ({"max_batch_tokens": 2}, "max_batch_tokens", "at least 8"),
        ({"quantization": {"bits": 4}}, "quantization.quant_method", "lacks quant_method"),
        ({"quantization": {"quant_method": "magic"}}, "quantization", "refused by transformers"),
    ],
)
def test_settings_that_cannot_be_served_name_the_key_and_the_remedy(
    llama_folder: Path, settings: dict[str, Any], param: str, message: str
):
    with config_error(message, param):
        load_engine(llama_folder, **settings)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [({"avx512f"}, torch.float32), ({"avx512f", "avx512_bf16"}, torch.bfloat16)],
    ids=["emulated", "native"],
)
def test_dtype_auto_is_the_checkpoints_own_unless_the_cpu_can_only_emulate_it(
    checkpoint_factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
    flags: set[str],
    expected: torch.dtype,
):
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset(flags))
    folder = checkpoint_factory("llama", dtype=torch.bfloat16)
    for dtype, served in (("auto", expected), ("bfloat16", torch.bfloat16)):
        assert {each.dtype for each in load_engine(folder, dtype=dtype).layers} == {served}


def test_a_device_map_spreads_one_process(llama_folder: Path):
    engine = load_engine(llama_folder, device_map="auto")
    found = rows(run(engine, Work("a", 0, prompt(9))))
    expected = last_logits(load_oracle(llama_folder), prompt(9))
    torch.testing.assert_close(found[0].cpu(), expected, atol=2e-5, rtol=2e-5)


def test_sliding_windows_are_learned_from_the_masks(checkpoint_factory: Factory):
    for name, windows in {
        "llama": [None] * 3,
        "mistral-sliding": [12] * 3,
        "gemma3": [12, None, 12],
        "phimoe": [12] * 3,
    }.items():
        engine = load_engine(checkpoint_factory(name))
        assert [layer.window for layer in engine.layers] == windows


def test_the_self_check_refuses_attention_it_does_not_know(llama_folder: Path, tmp_path: Path):
    """A Llama that biases scores by distance outside the attention function."""
    folder = altered(llama_folder, tmp_path / "biased", {"model_type": "biased_llama"})
    AutoConfig.register("biased_llama", BiasedLlamaConfig)
    AutoModelForCausalLM.register(BiasedLlamaConfig, BiasedLlamaForCausalLM)
    with config_error("BiasedLlamaForCausalLM cannot be served: with tree"):
        load_engine(folder)


class BiasedLlamaConfig(LlamaConfig):
    model_type = "biased_llama"


class BiasedLlamaForCausalLM(LlamaForCausalLM):
    config_class = BiasedLlamaConfig

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        embeddings = self.model.embed_tokens(input_ids)
        # Rows mix with the row before them, which need not be their parent in a tree.
        mixed = embeddings + torch.roll(embeddings, 1, dims=1)
        return super().forward(inputs_embeds=mixed, **kwargs)


def test_python_code_of_a_checkpoint_is_never_run(llama_folder: Path, tmp_path: Path):
    names = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    described = {"model_type": "of_its_own", "auto_map": names}
    folder, ran = altered(llama_folder, tmp_path / "own", described), tmp_path / "ran"
    (folder / "modeling.py").write_text(f"open({str(ran)!r}, 'w')")
    with pytest.raises(ConfigError):
        load_engine(folder)
    assert not ran.exists()


@pytest.mark.parametrize("has_kernels", [True, False])
def test_threads_are_as_configured_or_as_many_as_lose_nothing(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch
):
    native = Mock(num_threads=0) if has_kernels else None
    monkeypatch.setattr(kernels, "load", lambda: native)
    before = torch.get_num_threads()
    try:
        assert configure_threads(EngineConfig(threads=1, device="cpu")) == 1
        assert torch.get_num_threads() == 1
        expected = num_cores() if has_kernels else max(1, num_cores() // 2)
        assert configure_threads(EngineConfig(device="cpu")) == expected
        assert native is None or native.num_threads == expected
        assert configure_threads(EngineConfig(tensor_parallel=64, device="cpu")) == 1
    finally:
        torch.set_num_threads(before)
        monkeypatch.setattr(threads, "_are_ours", False)


@by_night
@needs_native
def test_loading_never_holds_the_weights_three_times(checkpoint_factory: Factory):
    """The file, the model, and of one layer at a time what becomes of it."""
    fields = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    small = checkpoint_factory("llama", head_dim=16, dtype=torch.bfloat16)
    large = checkpoint_factory("llama", dtype=torch.bfloat16, **fields)
    weights = (large / "model.safetensors").stat().st_size
    said = said_by(sys.executable, "-m", "tests.support.engine.loading_process", small, large)
    peak, after = map(int, said.split())
    assert peak < 3.0 * weights
    assert after < 1.5 * weights


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_beside_another_engine_it_is_the_same_model_and_torchs_default_stays(
    architecture: str, checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
):
    """The default is one for all threads: what a step makes meanwhile would be of half the size."""
    folder = checkpoint_factory(architecture, dtype=torch.bfloat16)
    config = EngineConfig(model=str(folder), device="cpu", dtype="bfloat16", num_pages=16)
    expected = load_model(config).module.state_dict()
    defaults = []
    set_default = torch.set_default_dtype
    monkeypatch.setattr(
        torch, "set_default_dtype", lambda dtype: (defaults.append(dtype), set_default(dtype))
    )
    planned(folder, describe(folder, config), config, is_here=True)
    found = load_model(config, beside=True).module.state_dict()
    assert set(defaults) <= {torch.float32}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_how_much_of_the_weights_is_mapped_and_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    caplog.set_level(logging.INFO)
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(4 * 10**6))
    with (
        progress.telling_of_weights(tmp_path),
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert len(mapped[:]) == 4 * 10**6
        wait_until(lambda: "phase load: 4 of 4 MB of weights read" in caplog.messages)
    assert caplog.messages[0] == "phase load"


def test_a_rope_that_depends_on_the_batch_is_served_up_to_its_original_length(
    checkpoint_factory: Factory,
):
    rope = {
        "rope_type": "dynamic",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
    }
    folder = checkpoint_factory("llama", rope_parameters=rope)
    assert load_engine(folder).max_context_len == 64
    with config_error("at most 64"):
        load_engine(folder, max_context_len=65)
