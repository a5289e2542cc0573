"""A GGUF file becomes the folder it was made from."""

import json
import os
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.config.schema import Config
from cluster.core import SamplingParams
from cluster.local import LLM
from cluster.models import cache
from cluster.models.fingerprint import folder_tokenizer_hash, model_hash
from cluster.models.names import GgufSource
from cluster.models.resolve import _converted, resolve
from cluster.text.tokenizer import Tokenizer
from tests.support.architectures import EOS_TOKEN_ID
from tests.support.engine.driver import Factory
from tests.support.errors import config_error
from tests.support.local_models import PROMPTS, target
from tests.support.models.gguf_files import converted, write_gguf


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([list(range(3, 60))])).logits


def test_weights_tokenizer_and_identity_are_those_of_the_original(
    llama_folder: Path, gguf_file: Path, tmp_path: Path
):
    folder = converted(llama_folder, tmp_path / "model")
    assert torch.equal(logits(folder), logits(llama_folder))
    assert folder_tokenizer_hash(folder) == folder_tokenizer_hash(llama_folder)
    ours, theirs = Tokenizer.load(folder), Tokenizer.load(llama_folder)
    text = "def fib(n):\n    return 1 if n < 2 else fib(n - 1)  # été <|im_end|>"
    assert ours.encode(text).tolist() == theirs.encode(text).tolist()
    assert ours.eos_token_ids == theirs.eos_token_ids
    messages = [{"role": "user", "content": "hello"}]
    assert ours.render_chat(messages) == theirs.render_chat(messages)
    assert model_hash(resolve(str(gguf_file))) == model_hash(folder)


def test_a_file_is_read_again_only_where_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = GgufSource(tmp_path / "x.gguf")
    source.path.touch()
    first = _converted(source)
    monkeypatch.setattr(cache, "sha256_of", lambda path: "another")
    assert _converted(source) == first
    os.utime(source.path, (1, 1))
    assert _converted(source) != first


def test_a_gguf_file_is_served_by_its_path(llama_folder: Path, gguf_file: Path):
    params = SamplingParams(temperature=0.0, max_tokens=16)
    texts = []
    for model in (llama_folder, gguf_file):
        with LLM(Config(target=target(model))) as llm:
            texts.append([item.token_ids for item in llm.generate(PROMPTS, params)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (GGMLQuantizationType.F16, "float16"),
        (GGMLQuantizationType.BF16, "bfloat16"),
        (GGMLQuantizationType.Q8_0, "bfloat16"),
    ],
)
def test_16_bit_weights_stay_and_quantised_ones_become_bfloat16(
    kind: GGMLQuantizationType, dtype: str, checkpoint_factory: Factory, tmp_path: Path
):
    # Blocks of 32 weights must fill the rows.
    checkpoint = checkpoint_factory("llama", hidden_size=64)
    folder = converted(checkpoint, tmp_path / "x", kind=kind)
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == dtype
    assert "quantization_config" not in config
    near = torch.nn.functional.cosine_similarity(
        logits(folder).flatten(), logits(checkpoint).flatten(), dim=0
    )
    assert near > 0.99


def test_digits_are_split_where_the_vocabulary_was_learned_so(llama_folder: Path, tmp_path: Path):
    folder = converted(llama_folder, tmp_path / "x", pre="smollm")
    backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("in  12 a")]
    assert pieces == ["in", "ĠĠ", "1", "2", "Ġa"]


def test_the_token_that_ends_a_turn_ends_a_text(llama_folder: Path, tmp_path: Path):
    fields = {"tokenizer.ggml.eot_token_id": 3}
    folder = converted(llama_folder, tmp_path / "x", fields=fields)
    assert Tokenizer.load(folder).eos_token_ids == (0, 3)


def test_text_begins_as_the_file_says(llama_folder: Path, tmp_path: Path):
    folder = converted(llama_folder, tmp_path / "x", add_bos=True)
    first, *others = Tokenizer.load(folder).encode("ab").tolist()
    assert first == EOS_TOKEN_ID  # also the bos token of these checkpoints
    assert others == Tokenizer.load(llama_folder).encode("ab").tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": False}, "holds no tokenizer"),
        ({"fields": {"split.count": 2}}, "llama-gguf-split --merge"),
        ({"left_out": "model.layers.1.mlp.up_proj.weight"}, r"lacks .*model\.layers\.1\.mlp\.up"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(
    options: dict[str, object], message: str, llama_folder: Path, tmp_path: Path, cache: Path
):
    file = write_gguf(llama_folder, tmp_path / "x.gguf", **options)
    with config_error(message):
        resolve(str(file))
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_something_else_with_the_ending_is_refused(tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(b"not a model at all, but long enough to be looked at")
    with config_error("is cut or is no GGUF file"):
        resolve(str(tmp_path / "x.gguf"))
