"""The blocks of a GGUF file are kept as they are, each for the layer and the row it belongs to."""

from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from cluster.models.experts import unstacked
from cluster.models.fingerprint import model_hash
from cluster.models.grouped import StoredGroups
from cluster.models.weights import GROUPED, check_weights
from tests.support.choices import by_day
from tests.support.engine.driver import Factory
from tests.support.errors import config_error
from tests.support.models.gguf_files import converted

EXACT = [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0]
ROUNDED = [GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K]


def layers(folder: Path) -> dict[str, torch.Tensor]:
    """The widened weights of the linear layers."""
    model = unstacked(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    modules = model.named_modules()
    return {name: each.weight for name, each in modules if isinstance(each, torch.nn.Linear)}


@pytest.mark.parametrize(
    ("kind", "is_tied"),
    by_day(
        [*zip([*EXACT, *ROUNDED], cycle([True, False]), strict=False)],
        [*product([*EXACT, *ROUNDED], [True, False])],
    ),
)
def test_every_layer_keeps_its_blocks_in_the_order_of_its_rows(
    kind: GGMLQuantizationType, is_tied: bool, checkpoint_factory: Factory, tmp_path: Path
):
    # Blocks must fill the rows; queries and keys are stored in another order.
    checkpoint = checkpoint_factory(
        "llama", hidden_size=256, intermediate_size=256, tie_word_embeddings=is_tied
    )
    folder = converted(checkpoint, tmp_path / "x", kind=kind)
    found, wanted = StoredGroups(folder), layers(folder)
    assert set(found) == wanted.keys()
    for name, weight in found.items():
        if kind in EXACT:
            assert torch.equal(weight.dequantized().bfloat16(), wanted[name]), name
        else:
            torch.testing.assert_close(
                weight.dequantized(), wanted[name].float(), rtol=2e-2, atol=1e-3
            )
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize("kind", by_day(EXACT[2:], EXACT[1:]), ids=lambda kind: kind.name)
def test_every_expert_keeps_its_blocks_and_what_weighs_experts_has_none(
    kind: GGMLQuantizationType, checkpoint_factory: Factory, tmp_path: Path
):
    folder = converted(checkpoint_factory("qwen2-moe", hidden_size=64), tmp_path / "x", kind=kind)
    found, wanted = StoredGroups(folder), layers(folder)
    assert len([name for name in found if ".experts." in name]) == 3 * 4 * 3
    wide = {f"model.layers.{index}.mlp.shared_expert_gate" for index in range(3)}
    assert set(found) == wanted.keys() - wide
    for name, weight in found.items():
        assert torch.equal(weight.dequantized().bfloat16(), wanted[name]), name


def test_matrices_of_another_kind_and_those_that_are_not_the_files_are_left_out(
    checkpoint_factory: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoint = checkpoint_factory("llama", hidden_size=64)
    for kind in (GGMLQuantizationType.Q5_0, GGMLQuantizationType.F16):
        folder = converted(checkpoint, tmp_path / kind.name, kind=kind)
        assert not (folder / GROUPED).exists()
        assert not StoredGroups(folder)
    load = AutoModelForCausalLM.from_pretrained

    def changed(*given: object, **named: object) -> object:
        model, report = load(*given, **named)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3] += 1.0
        return model, report

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", changed)
    folder = converted(checkpoint, tmp_path / "changed", kind=GGMLQuantizationType.Q4_1)
    monkeypatch.undo()
    left_out = layers(folder).keys() - set(StoredGroups(folder))
    assert left_out == {"model.layers.1.mlp.up_proj"}


def test_the_blocks_are_no_part_of_a_checkpoints_identity_and_must_be_whole(
    checkpoint_factory: Factory, tmp_path: Path
):
    checkpoint = checkpoint_factory("llama", hidden_size=64)
    folder = converted(checkpoint, tmp_path / "x", kind=GGMLQuantizationType.Q4_1)
    check_weights(folder)
    with_blocks, kept = model_hash(folder), folder / GROUPED
    kept.write_bytes(kept.read_bytes()[:-1])
    with config_error("is damaged"):
        check_weights(folder)
    kept.unlink()
    assert model_hash(folder) == with_blocks
