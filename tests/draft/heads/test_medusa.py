"""Medusa heads in both published forms, against the heads written out once more."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.draft.heads.checkpoint import HeadTarget
from cluster.draft.heads.load import load_draft_head
from cluster.draft.heads.medusa import MedusaHead
from tests.support.draft.heads import written
from tests.support.errors import config_error

HIDDEN, VOCAB, HEADS, LAYERS = 16, 30, 3, 2
OUTPUT = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
TARGET = HeadTarget(HIDDEN, VOCAB, 4, {"output": OUTPUT}.__getitem__)
ROWS = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(6))


def weights(*, bias: bool = True) -> dict[str, torch.Tensor]:
    """As the authors name them."""
    generator = torch.Generator().manual_seed(7)
    held = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            name = f"{head}.{layer}.linear"
            held[f"{name}.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) / 4
            if bias:
                held[f"{name}.bias"] = torch.randn(HIDDEN, generator=generator)
        held[f"{head}.{LAYERS}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    return held


def plain(held: dict[str, torch.Tensor], head: int, output: torch.Tensor) -> torch.Tensor:
    rows = ROWS
    for layer in range(LAYERS):
        name = f"{head}.{layer}.linear"
        linear = rows @ held[f"{name}.weight"].T + held.get(f"{name}.bias", torch.zeros(1))
        rows = rows + linear * torch.sigmoid(linear)
    return rows @ output.T


def vllm_names(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    named = {}
    for name, tensor in held.items():
        head, layer, *rest = name.split(".")
        named[
            f"blocks.{head}.layers.{layer}.{rest[-1]}"
            if rest[0] == "linear"
            else f"lm_heads.{head}.weight"
        ] = tensor
    return named


def loaded(folder: Path, config: dict[str, Any], held: dict[str, torch.Tensor]) -> MedusaHead:
    return load_draft_head(written(folder, config, held, "medusa_lm_head.safetensors"), TARGET)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["authors", "prefixed", "vllm"])
def test_logits_equal_the_heads_written_out(form: str, bias: bool, tmp_path: Path):
    held = weights(bias=bias)
    named = {
        "authors": held,
        "prefixed": {f"medusa_heads.{name}": tensor for name, tensor in held.items()},
        "vllm": vllm_names(held),
    }[form]
    # The published configuration says 2 heads where the file holds more.
    head = loaded(tmp_path, {"medusa_num_heads": 2, "medusa_num_layers": 1}, named)
    assert (head.spec.num_heads, head.spec.num_layers) == (HEADS, LAYERS)
    with torch.no_grad():
        found = head(ROWS)
    for index in range(HEADS):
        wanted = plain(held, index, held[f"{index}.{LAYERS}.weight"])
        torch.testing.assert_close(found[:, index], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("keys", "extra"),
    [
        ({"original_lm_head": True}, {}),
        (
            {"truncated_vocab_size": 10},
            {"lm_head.weight": OUTPUT[:10].clone(), "token_map": torch.arange(10) * 3},
        ),
    ],
)
def test_one_output_layer_may_serve_all_heads(
    keys: dict[str, Any], extra: dict[str, torch.Tensor], tmp_path: Path
):
    """The target's, or one of its own with fewer tokens."""
    held = weights()
    named = {name: each for name, each in vllm_names(held).items() if "lm_heads" not in name}
    named |= extra
    head = loaded(tmp_path, {"model_type": "medusa", **keys}, named)
    with torch.no_grad():
        found = head(ROWS)[:, 2]
    wanted = plain(held, 2, extra.get("lm_head.weight", OUTPUT))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(head.token_map, extra.get("token_map", torch.arange(VOCAB)))
    if extra:
        with config_error("it has no token_map"):
            loaded(tmp_path, {"model_type": "medusa"}, named | {"token_map": None})


def test_a_lost_tensor_is_named(tmp_path: Path):
    held = weights() | {"1.0.linear.weight": None}
    with config_error(r"lacks 1\.0\.linear\.weight"):
        loaded(tmp_path, {"medusa_num_heads": 3}, held)
