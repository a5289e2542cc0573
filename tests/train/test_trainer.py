"""Training reads its data in a fixed order and continues exactly where it stopped."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from cluster.train.trainer import (
    Budget,
    Optimizers,
    Order,
    Rates,
    Trainer,
    TrainingPhase,
    TrainSettings,
    new_accelerator,
    processes,
    run_together,
)
from models.recipe.corpus import Tokens, WindowOrder
from models.recipe.demo import LanguageLoss, Shape, build
from tests.support.choices import by_night
from tests.support.errors import config_error

VOCAB = 64
TINY = Shape(32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=64)


def tiny_network(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return build(TINY, end_of_text_id=0, vocab_size=VOCAB)


def token_streams() -> list[Tokens]:
    """Two streams in which every token but the first follows from the one before."""
    counting = (np.arange(3000) * 7) % VOCAB
    return [counting.astype(np.uint16), (counting[:1000] ** 2 % VOCAB).astype(np.uint16)]


def orders_of(settings: TrainSettings) -> list[Order]:
    streams = token_streams()
    return [WindowOrder(streams, phase.length, settings.seed).read for phase in settings.phases]


class NoisyLoss(LanguageLoss):
    """With dropout's noise; may end the run before one of its batches."""

    batches_left = math.inf

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        self.batches_left -= 1
        if self.batches_left < 0:
            raise KeyboardInterrupt
        noise = nn.functional.dropout(torch.ones(windows.shape[1], device=windows.device), 0.1)
        return super().forward((windows * noise).long() % VOCAB)


def tiny_trainer(
    network: LlamaForCausalLM,
    steps: int,
    checkpoint: Path | None,
    objective: type[LanguageLoss] = LanguageLoss,
    tokens_per_step: int = 128,
) -> Trainer:
    """It writes its checkpoint after every step."""
    phases = (TrainingPhase(0.0, 16, 4), TrainingPhase(0.5, 32, 2))
    settings = TrainSettings(
        Budget(steps=steps), phases, tokens_per_step, seed=5, checkpoint_every_s=0.0
    )
    return Trainer(objective(network), orders_of(settings), settings, checkpoint)


def test_resumed_run_ends_with_the_same_bits_as_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = tiny_network(seed=1)
    tiny_trainer(whole, 8, None, NoisyLoss).run()
    interrupted = tiny_trainer(tiny_network(seed=1), 8, tmp_path / "run.pt", NoisyLoss)
    with monkeypatch.context() as patched:
        patched.setattr(NoisyLoss, "batches_left", 11)  # two a step
        with pytest.raises(KeyboardInterrupt):
            interrupted.run()
    continued = tiny_network(seed=2)
    trainer = tiny_trainer(continued, 8, tmp_path / "run.pt", NoisyLoss)
    trainer.run()
    assert trainer.position.num_steps == 8
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, continued.state_dict()[name]), name


@pytest.mark.parametrize("computes", [True, False])
def test_products_are_in_bfloat16_only_where_the_processor_has_them(
    monkeypatch: pytest.MonkeyPatch, computes: bool
):
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    monkeypatch.setattr("cluster.train.trainer.computes", lambda dtype, device: computes)
    with new_accelerator().autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if computes else torch.float32)


class DtypesOfProducts(TorchDispatchMode):
    """Notes what the optimiser's products are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("computes", [True, False])
def test_muon_iterates_in_bfloat16_only_where_the_processor_has_them(
    monkeypatch: pytest.MonkeyPatch, computes: bool
):
    monkeypatch.setattr("cluster.train.trainer.computes", lambda dtype, device: computes)
    layer = nn.Linear(8, 8)
    before = layer.weight.detach().clone()
    layer(torch.eye(8)).square().sum().backward()
    with DtypesOfProducts() as products:
        Optimizers(dict(layer.named_parameters()), Rates()).step(0.1)
    assert products.seen == {torch.bfloat16 if computes else torch.float32}
    assert not torch.equal(layer.weight, before)


def test_time_budget_ends_by_the_clock():
    now_s = iter(range(0, 10_000, 20))
    settings = TrainSettings(
        Budget(minutes=2.0), (TrainingPhase(0.0, 16, 4),), tokens_per_step=64, seed=5
    )
    network = tiny_network(seed=1)
    trainer = Trainer(LanguageLoss(network), orders_of(settings), settings)
    trainer.run(clock=lambda: float(next(now_s)))
    assert trainer.position.num_steps == 6


@pytest.mark.parametrize(("steps", "minutes"), [(None, None), (3, 1.0), (0, None), (None, -1.0)])
def test_budget_is_exactly_one_positive_number(steps: int | None, minutes: float | None):
    with config_error(r"budget|either"):
        Budget(steps=steps, minutes=minutes)


def test_every_window_of_an_epoch_is_read_once():
    order = WindowOrder([np.arange(1000, dtype=np.uint16)], 10, seed=0)
    starts = order.read(0, order.windows_per_epoch())[:, 0].tolist()
    assert len(set(starts)) == len(starts)
    assert np.diff(sorted(starts)).tolist() == [10] * (len(starts) - 1)


def test_streams_shorter_than_a_window_are_refused():
    with config_error("shorter than one window of 64"):
        WindowOrder([np.zeros(30, dtype=np.uint16)], 64, seed=0)


def _train_and_save(folder: Path, *tokens_per_step: int) -> None:
    state = processes()
    name = f"{state.process_index}-of-{state.num_processes}"
    for each in tokens_per_step:
        network = tiny_network(seed=1)
        tiny_trainer(network, 6, None, tokens_per_step=each).run()
        torch.save(network.state_dict(), folder / f"{name}-{each}.pt")


@by_night
def test_two_processes_train_as_one_does(tmp_path: Path):
    """Each takes a part of a step, which is made larger where there are too few."""
    _train_and_save(tmp_path, 128)
    run_together(2, _train_and_save, tmp_path, 128, 64)
    one = torch.load(tmp_path / "0-of-1-128.pt")
    for each in (128, 64):
        first, second = (torch.load(tmp_path / f"{rank}-of-2-{each}.pt") for rank in range(2))
        for name, weight in one.items():
            torch.testing.assert_close(first[name], weight, rtol=1e-4, atol=1e-5)
            assert torch.equal(first[name], second[name]), (each, name)
