"""What a GPU keeps free beside weights and KV cache is what the widest step takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config.schema import EngineConfig
from cluster.engine.memory.reserve import Reserve, measured, reserve, run
from cluster.spec.draw import drawing_bytes
from tests.support.architectures import SERVED
from tests.support.choices import by_day
from tests.support.engine.driver import load_engine

VOCAB_SIZE = 128_256
CONFIG = EngineConfig(max_batch_tokens=2048)


@pytest.mark.parametrize(
    "architecture",
    # Keys and values, convolutions, states, and what layers share.
    by_day(["llama", "lfm2", "qwen3.5", "gemma4"], SERVED),
)
def test_a_forward_without_a_cache_runs_for_every_architecture(
    architecture: str, checkpoint_factory: Callable[..., Path]
) -> None:
    """It is what a GPU's memory is measured by, and nothing on a CPU."""
    engine = load_engine(checkpoint_factory(architecture))
    run(engine.model, 40, 3)
    assert measured(engine.config, engine.model, 3) == engine.reserve == Reserve()


def reserved(of_row: int, *, in_graphs: bool) -> Reserve:
    """Where each row of a forward takes so many bytes."""
    forward = lambda rows, _: rows * of_row  # noqa: E731
    return reserve(CONFIG, (), VOCAB_SIZE, 64, forward, on_one_gpu=in_graphs)


def test_a_step_takes_the_more_of_its_forward_and_its_draws() -> None:
    drawing, forward = drawing_bytes(64, VOCAB_SIZE), 2048 * 10**6
    assert drawing < reserved(1, in_graphs=False).steps <= 1.1 * drawing
    assert forward < reserved(10**6, in_graphs=False).steps <= 1.1 * forward


def test_graphs_take_what_the_widest_one_does() -> None:
    wide, logits = 512 * 10**6, 256 * VOCAB_SIZE * 4
    assert wide + logits < reserved(10**6, in_graphs=True).graphs <= 1.1 * (wide + logits)
    assert reserved(10**6, in_graphs=False).graphs == 0
