"""`drafthouse check` says what a model takes before it is here, from its configuration alone."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from cluster.config.file import load
from cluster.config.schema import EngineConfig
from cluster.engine.loading.inspection import describe
from cluster.engine.loading.planned import Planned, planned
from cluster.models import resolve as published_models
from cluster.models.resolve import published
from deployments.preflight import inspect
from deployments.report import size
from tests.conftest import Run
from tests.support.choices import by_day
from tests.support.draft.other_vocabulary import other_copy
from tests.support.errors import config_error

pytestmark = pytest.mark.usefixtures("no_models")
PUBLISHED = Path(published_models.__file__).with_name("published_configs")
RECIPE = "configs/llama-70b-8xh100.yaml"
# As their makers state them.
PARAMETERS = yaml.safe_load(Path(__file__).with_name("published_sizes.yaml").read_text("utf-8"))
# The fields from which a size follows.
SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
    "kv_lora_rank",
)


def sized(model: str, **settings: object) -> Planned:
    folder = published(model)
    engine = EngineConfig(model=model, **settings)
    return planned(folder, describe(folder, engine), engine, is_here=False)


@pytest.mark.parametrize("model", by_day([*PARAMETERS][::4], PARAMETERS))
def test_a_published_configuration_has_the_published_number_of_parameters(model: str):
    folder = published(model)
    engine = EngineConfig(model=model)
    described = describe(folder, engine)
    sizes = planned(folder, described, engine, is_here=False)
    assert sizes.num_parameters == PARAMETERS[model]
    assert described.text_config.dtype == torch.bfloat16, "counting has changed it"


def shape_of(folder: Path) -> tuple[object, ...]:
    values = json.loads((folder / "config.json").read_text("utf-8"))
    return tuple((values | values.get("text_config", {})).get(name) for name in SHAPE)


def test_every_published_configuration_has_the_shape_of_one_that_was_counted():
    counted = {model: published(model) for model in PARAMETERS}
    shapes = {shape_of(folder) for folder in counted.values() if folder is not None}
    folders = [path.parent for path in PUBLISHED.glob("*/config.json")]
    assert len(folders) > len(PARAMETERS)
    assert [each.name for each in folders if shape_of(each) not in shapes] == []


def test_latents_are_counted_and_what_makes_keys_of_them_stays_wide():
    """Of DeepSeek V3, in 8 bits: 512 + 64 numbers of a token and layer, for all of its heads."""
    sizes, model = sized("deepseek-ai/DeepSeek-V3"), "deepseek-ai/DeepSeek-V3"
    assert sizes.kv_per_token == 61 * (512 + 64) * 2
    outside, wide = 2 * 129280 * 7168 + 7168, 61 * 512 * 128 * (128 + 128)
    assert sizes.weights == PARAMETERS[model] + outside + wide
    with config_error("the latents of deepseek_v3 are not split"):
        sized(model, tensor_parallel=8)


@pytest.mark.parametrize(("model", "gib"), [("20b", 12.8), ("120b", 60.8)])
def test_experts_of_four_bits_have_their_scales_and_the_rest_its_own_format(model: str, gib: float):
    """As the model card states the checkpoints' sizes."""
    assert sized(f"openai/gpt-oss-{model}").weights == pytest.approx(gib * 2**30, rel=0.01)


def test_a_model_of_the_catalogue_is_sized_before_it_is_fetched():
    assert sized("smollm2-135m-instruct", dtype="float32").weights == 4 * 134_515_008


def test_check_sizes_the_recipe_for_eight_gpus(run: Run):
    """The drafter draws where it expands nodes and where texts that it reads end, not at a target's
    rows."""
    text, engines = run("check", RECIPE), json.loads(run("check", RECIPE, "--json"))["engines"]
    assert "unknown" not in text
    first, second = (line.split() for line in text.splitlines() if line.startswith("target.engine"))
    assert first[1:5] == ["131.4", "GiB", "320", "MiB"]
    assert second[5:] == ["32.86", "GiB", "on", "each", "of", "4", "GPUs"]
    assert second[1] == "none"  # on 24 GB
    # 2,700 tokens for each text that may run, or ten of the longest.
    assert int(second[3].replace(",", "")) > 10 * 32768
    assert "8 GPU" in text
    for engine in engines:
        share = (
            f"the KV cache of {engine['path']}: {engine['memory_share']} of a GPU's memory, less\n"
        )
        assert share in text
        terms = [engine[key] for key in ("rank_weights_bytes", "step_bytes", "graph_bytes")]
        assert all(f"{size(each):>14} " in text for each in terms)
        cache = engine["kv_tokens_by_gpu_gb"]["80"] * engine["kv_bytes_per_token"] / engine["ranks"]
        in_use = engine["memory_share"] * 80e9
        assert sum(terms) + cache == pytest.approx(in_use, abs=engine["kv_bytes_per_token"])
    by_path = {each["path"]: each for each in engines}
    assert by_path["target.engine"]["logit_rows"] == 128 * 16
    drafter = by_path["drafters.lm.options.engine"]
    assert drafter["logit_rows"] == 64 + 128
    assert drafter["step_bytes"] + drafter["graph_bytes"] < 3 * 2**30
    assert drafter["kv_tokens_by_gpu_gb"]["24"] > 10 * 32768


def test_a_stage_of_a_cascade_draws_for_the_trees_of_the_one_before():
    config = load(
        "configs/tiny.yaml",
        [
            "drafters.both={kind: cascade, options: {stages: [suffix, lm]}}",
            "tasks={default: [both, code]}",
        ],
    ).config
    found = inspect(config, is_here=True)
    sizes = {name: found[f"drafters.{name}.options.engine"].sizes for name in ("lm", "code")}
    assert sizes["lm"].logit_rows > sizes["code"].logit_rows == 64 + 64


def test_what_every_rank_has_whole_is_counted_whole():
    """Norms alone, in Llama: all else is split."""
    whole, split = (
        sized("meta-llama/Llama-3.3-70B-Instruct"),
        sized("meta-llama/Llama-3.3-70B-Instruct", tensor_parallel=4),
    )
    assert split.weights == whole.weights == whole.rank_weights
    norms = 2 * (2 * 80 + 1) * 8192
    assert split.rank_weights == pytest.approx((whole.weights - norms) / 4 + norms, rel=1e-6)


def test_quantised_weights_have_the_bits_that_are_stated_or_asked_for(tmp_path: Path):
    model = "meta-llama/Llama-3.1-8B-Instruct"
    source = published(model)
    values = json.loads((source / "config.json").read_text("utf-8"))
    values["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(values))
    outside = 2 * 128256 * 4096 + 4096
    for bits, sizes in (
        (4, sized(str(tmp_path))),
        (8.5, sized(model, weights="int8")),
        (5, sized(model, weights="int4")),
    ):
        assert sizes.weights == (PARAMETERS[model] - outside) * bits / 8 + 2 * outside


def alone(folder: Path, tmp_path: Path) -> Path:
    """A folder with the config.json of `folder` and nothing else."""
    copy = tmp_path / "alone"
    copy.mkdir()
    (copy / "config.json").write_text((folder / "config.json").read_text("utf-8"))
    return copy


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gemma3", "gpt2"])
def test_a_config_alone_gives_the_size_of_the_weights_that_are_not_there(
    architecture: str, checkpoint_factory: Callable[..., Path], tmp_path: Path
):
    folder = checkpoint_factory(architecture)
    bare = alone(folder, tmp_path)
    engine = EngineConfig(model=str(folder))
    there = planned(folder, describe(folder, engine), engine, is_here=False)
    found = sized(str(bare))
    assert found.kv_per_token == there.kv_per_token
    # The file has names and shapes besides, some kilobytes.
    assert found.weights <= there.weights <= found.weights + 64 * 1024


def test_check_takes_a_config_alone_and_serve_does_not(
    llama_folder: Path, tmp_path: Path, run: Run
):
    bare = alone(llama_folder, tmp_path)
    setting = f"target.engine.model={bare}"
    assert "sized by its configuration" in run("check", "configs/own-model.yaml", "--set", setting)
    with config_error(r"target\.engine\.model"):
        inspect(load("configs/own-model.yaml", [setting]).config, is_here=True)


def test_a_model_that_nobody_knows_stays_unknown(run: Run):
    text = run("check", RECIPE, "--set", "target.engine.model=nobody/knows-it")
    assert "nobody/knows-it (not on this machine, so not compared)" in text


def test_the_plan_for_programs_has_what_the_text_says(run: Run):
    words = ("check", "configs/tiny.yaml", "--set", "target.engine.num_pages=64")
    text, found = run(*words), json.loads(run(*words, "--json"))
    assert f"model {found['model']}\n" in text
    for deployment in found["deployments"]:
        assert f"{deployment['name']:<20} {deployment['replicas']:>8}" in text
    for engine in found["engines"]:
        assert f"a KV cache of {size(engine['kv_cache_bytes'])}" in text
        assert f"{engine['kv_cache_tokens']:,} tokens" in text
    assert found["engines"][0]["kv_cache_tokens"] == 64 * 16
    for name, place in found["drafters"].items():
        assert f"drafter {name}: {place}\n" in text
    assert found["tasks"]["code"] == ["code", "suffix", "ngram"]
    assert found["reserved"] == {"CPU": 0.6}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "keeps nobody's answers (tenants: none)"),
        (
            {"tenants": "unsalted", "folder": "/a", "share": 0.25},
            "keeps the answers to 25% of requests with neither API key nor salt, in memory, until "
            "asked for in /a",
        ),
        (
            {"tenants": "all", "folder": "/a", "share": 1.0, "keep": "disk"},
            "keeps the answers to 100% of all requests, in /a",
        ),
    ],
)
def test_check_says_whose_answers_are_kept(options: dict[str, object], told: str, run: Run):
    tape = json.dumps({"kind": "recorder", "options": options})
    said = run("check", "configs/tiny.yaml", "--set", f"drafters.tape={tape}")
    assert f"drafter tape: {told}\n" in said


def test_check_says_what_another_vocabulary_shares(llama_folder: Path, tmp_path: Path, run: Run):
    pairs, letters = range(260, 288), [4 + ord(each) - ord("!") for each in "etinosrhlu"]
    for left_out, told in (
        ((), "it writes 288 of its 288 tokens, 100%, which are 100% of a sample of prose"),
        (pairs, "it writes 260 of its 260 tokens, 100%, which are 92% of a sample of prose"),
        ((*pairs, *letters), "WARNING: below 70% few drafts can be right"),
        (range(100, 288), "use a draft model with the target's tokenizer"),
    ):
        folder = other_copy(llama_folder, tmp_path / f"lacks-{len(left_out)}", left_out=left_out)
        words = ["check", "configs/own-model.yaml"]
        for key, value in (
            ("target.engine.model", llama_folder),
            ("drafters.lm.kind", "lm"),
            ("drafters.lm.options.engine.model", folder),
        ):
            words += ["--set", f"{key}={value}"]
        assert told in run(*words, status=2 if told.startswith("use") else 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees this machine's GPU")
def test_check_refuses_a_gpu_that_torch_does_not_see(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 550.54.15\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = ("check", "configs/own-model.yaml", "--set", f"target.engine.model={llama_folder}")
    told = run(*words, status=2)
    assert "target.engine.device: " in told
    assert "driver 550.54.15" in told
    assert torch.__version__ in told
    run(*words, "--set", "target.engine.device=cpu")
