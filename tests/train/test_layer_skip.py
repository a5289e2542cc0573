"""The search drops the layers whose loss costs least agreement, and says what that is worth."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from cluster.train.layer_skip import Found, search, table
from tests.support.engine.driver import Factory
from tests.train.test_cli import parse, run

NUM_LAYERS = 8


def kept(losses: Sequence[float], layers: Sequence[int]) -> Found:
    """Of a target in which each layer's loss costs a share of the agreement of its own."""
    agreement = 1.0
    for layer, loss in enumerate(losses):
        agreement *= 1.0 if layer in layers else 1.0 - loss
    return Found(tuple(layers), agreement, len(layers) / len(losses))


def test_the_layers_that_cost_nothing_are_dropped():
    losses = [0.9, 0.9, 0.0, 0.9, 0.0, 0.0, 0.9, 0.0]
    best = max(search(NUM_LAYERS, partial(kept, losses)), key=lambda row: row.chain)
    assert best.layers == (0, 1, 3, 6)
    assert best.chain[0] > 1.3


def test_a_dropped_layer_is_exchanged_where_its_neighbour_is_the_better_one():
    """Layer 2 is the cheapest one to lose first; with 3 and 4 lost, 1 would have been."""
    losses = [0.9, 0.05, 0.04, 0.0, 0.0, 0.9, 0.9, 0.9]

    def measure(layers: Sequence[int]) -> Found:
        found = kept(losses, layers)
        is_torn = not {2, 3, 4} & set(layers)
        return Found(found.layers, found.agreement * (0.5 if is_torn else 1.0), 0.2)

    best = search(NUM_LAYERS, measure)[-1]
    assert not {2, 3, 4}.isdisjoint(best.layers)


@pytest.mark.parametrize(
    ("agreement", "cost", "speed", "size"), [(0.5, 0.25, 1.2, 1), (1.0, 0.1, 5.0, 8)]
)
def test_the_speed_up_is_that_of_the_best_chain(
    agreement: float, cost: float, speed: float, size: int
):
    assert Found((0,), agreement, cost).chain == pytest.approx((speed, size))


def test_the_table_marks_the_best_row():
    rows = [Found((0, 1), 0.9, 0.3), Found((0,), 0.2, 0.1)]
    lines = table(rows, 3).splitlines()
    assert [line.endswith("*") for line in lines[1:]] == [True, False]


def test_of_one_layer_none_can_be_left_out(
    checkpoint_factory: Factory, capsys: pytest.CaptureFixture[str]
):
    folder = checkpoint_factory("llama", num_hidden_layers=1)
    assert run(parse("layer-skip", str(folder), "--tokens", "64")) == 2
    assert "has one layer" in capsys.readouterr().err


def test_the_command_finds_a_layer_that_does_nothing(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, out = tmp_path / "spare", tmp_path / "skip.yaml"
    shutil.copytree(llama_folder, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    spare = model.model.layers[1]
    for product in (spare.self_attn.o_proj, spare.mlp.down_proj):
        torch.nn.init.zeros_(product.weight)
    model.save_pretrained(folder)

    assert run(parse("layer-skip", str(folder), "--tokens", "64", "--out", str(out))) == 0

    written = capsys.readouterr().out
    first = written.splitlines()[1].split()
    assert first[:2] == ["1", "1.000"], "without that one layer it agrees everywhere"
    assert 1 in yaml.safe_load(out.read_text())["options"]["skip_layers"]
    assert out.read_text() in written
