"""Where packages are missing, quantised models are refused by name; no ImportError is seen."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from cluster.config.schema import EngineConfig
from cluster.engine.loading.inspection import check_loadable
from cluster.engine.loading.model import load_model
from cluster.engine.loading.planned import bare_module, planned
from cluster.engine.work import Work
from cluster.errors import ConfigError
from tests.support.choices import by_day
from tests.support.engine.altered import altered
from tests.support.engine.driver import Factory, load_engine, prompt, rows, run

# Of each method: the package that its refusal names, or what else stands in the way on a CPU.
NAMED = {
    "aqlm": "aqlm",
    "auto-round": "auto-round",
    "awq": "gptqmodel",
    "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "kernels",
    "fbgemm_fp8": "GPU",
    "fouroversix": "fouroversix",
    "fp_quant": "GPU",
    "gptq": "optimum",
    "higgs": "GPU",
    "hqq": "HQQ",
    "nvfp4": "NVFP4",
    "quanto": "optimum-quanto",
    "quark": "Quark",
    "spqr": "GPU",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
PACKAGES = [
    "aqlm",
    "auto_round",
    "gptqmodel",
    "bitsandbytes",
    "compressed_tensors",
    "kernels",
    "fbgemm_gpu",
    "fouroversix",
    "fp_quant",
    "optimum",
    "flute",
    "hqq",
    "quark",
    "spqr_quant",
    "torchao",
    "vptq",
    "sinq",
    "mlx",
]
SETTINGS = {
    "auto-round": {"bits": 4},
    "awq": {"bits": 4},
    "bitsandbytes_4bit": {"load_in_4bit": True},
    "bitsandbytes_8bit": {"load_in_8bit": True},
    "compressed-tensors": {"config_groups": {}, "format": "dense"},
    "gptq": {"bits": 4},
    "spqr": {"bits": 3, "beta1": 16, "beta2": 16, "shapes": {}},
    "torchao": {"quant_type": "int8_weight_only"},
}


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)


def fields_of(method: str) -> dict[str, Any]:
    name = "bitsandbytes" if method.startswith("bitsandbytes") else method
    return {"quant_method": name, **SETTINGS.get(method, {})}


def refusal(act: Callable[[], object]) -> str:
    """What is said; "" for what is done.  Whatever else is raised fails the test."""
    try:
        act()
    except ConfigError as error:
        return error.message
    return ""


def stored(checkpoint: Path, folder: Path, method: str, **fields: Any) -> Path:
    """A copy whose configuration says that its weights are quantised so."""
    described = {"quantization_config": fields_of(method) | fields}
    return altered(checkpoint, folder, described)


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
def test_what_transformers_widens_is_said_and_counted(
    method: str, checkpoint_factory: Factory, tmp_path: Path
):
    folder = stored(checkpoint_factory("llama"), tmp_path / "model", method)
    config = EngineConfig(model=str(folder), device="cpu")
    described = check_loadable(folder, config, is_here=True)
    assert described.weights.startswith(f"weights {method} are widened to bfloat16")
    (folder / "model.safetensors").write_bytes(b"")  # whose numbers would be in fewer bits
    wide = sum(each.nbytes for each in bare_module(described).parameters())
    assert planned(folder, described, config, is_here=True).weights == wide
    (folder / "model.safetensors").unlink()
    assert planned(folder, described, config, is_here=False).weights < wide / 2


@pytest.mark.usefixtures("without_packages")
def test_blocks_of_eight_bits_are_widened_whatever_their_scales_are(
    checkpoint_factory: Factory, tmp_path: Path
):
    """DeepSeek's are of float32, and the other weights of bfloat16."""
    plain = altered(checkpoint_factory("llama"), tmp_path / "plain")
    narrow = altered(plain, tmp_path / "narrow", {"dtype": "bfloat16"})
    folder = stored(narrow, tmp_path / "model", "fp8", weight_block_size=[8, 8])
    weights = {k: v.bfloat16() for k, v in load_file(plain / "model.safetensors").items()}
    wide = {name: each.float() for name, each in weights.items()}
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        blocks = weights[name].float().unflatten(1, (-1, 8)).unflatten(0, (-1, 8))
        scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
        rounded = (blocks / scales).to(torch.float8_e4m3fn)
        weights[name] = rounded.flatten(2).flatten(0, 1)
        weights[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
        wide[name] = (rounded.float() * scales).flatten(2).flatten(0, 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(wide, plain / "model.safetensors", metadata={"format": "pt"})
    found, wanted = (
        rows(run(load_engine(each), Work("a", 0, prompt(20)))) for each in (folder, plain)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize("asked", by_day([False], [False, True]))
@pytest.mark.parametrize("method", sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
def test_every_method_is_served_or_refused_in_words(
    method: str, checkpoint_factory: Factory, tmp_path: Path, *, asked: bool
):
    settings = {"quantization": fields_of(method)} if asked else {}
    plain = checkpoint_factory("llama")
    folder = plain if asked else stored(plain, tmp_path / "model", method)
    config = EngineConfig(model=str(folder), device="cpu", **settings)
    checked = refusal(lambda: check_loadable(folder, config, is_here=True))
    loaded = refusal(lambda: load_model(config))
    if not asked and method in NAMED:
        assert NAMED[method] in checked
        assert NAMED[method] in loaded
    if checked:
        assert loaded, "what check refuses is not loaded"
