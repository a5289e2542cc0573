"""Random LoRA adapters in peft's folders, and the plain models that they stand for."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cluster.engine.work import Work
from tests.support.engine.driver import TREE, check_rows, load_engine, load_oracle, prompt, run

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERYTHING = (*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head")


def write_adapter(
    base: Path,
    folder: Path,
    targets: Sequence[str] = EVERYTHING,
    *,
    rank: int = 4,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """An adapter of the model in `base`, in every layer whose name ends so; returns its folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in load_oracle(base).named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets:
            key = f"base_model.model.{name}.lora_"
            sizes = {"A": (rank, module.in_features), "B": (module.out_features, rank)}
            for side, shape in sizes.items():
                tensors[f"{key}{side}.weight"] = torch.randn(shape, generator=generator) * 0.3
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(targets),
        "bias": "none",
        "base_model_name_or_path": str(base),
        "init_lora_weights": True,
        "use_rslora": False,
    } | settings
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def check_adapter(folder: Path, adapter: Path) -> None:
    """Rows of a text and of a tree are those of the model with the adapter in its weights."""
    engine = load_engine(folder, adapters={"a": str(adapter)})
    output = run(engine, Work("a", 0, prompt(20), TREE, adapter=1))
    check_rows(output, merged_oracle(folder, adapter), prompt(20), TREE, bound=1e-4)


def merged_oracle(base: Path, adapter: Path) -> Any:
    """transformers' model with the adapter added to its weights: no code of the engine's."""
    model = load_oracle(base)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for key, down in tensors.items():
            name, _, side = key.removeprefix("base_model.model.").partition(".lora_")
            if side != "A.weight":
                continue
            up = tensors[key.replace("lora_A", "lora_B")]
            divisor = len(down) ** 0.5 if settings["use_rslora"] else len(down)
            scale = settings["lora_alpha"] / divisor
            model.get_submodule(name).weight += scale * up @ down
    return model
