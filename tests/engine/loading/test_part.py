"""Some layers of a model compute what a model of them alone would, with the same tensors."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.config.schema import EngineConfig
from cluster.core import TokenArray, token_array
from cluster.engine.engine import Engine
from cluster.engine.first_layers import FirstLayers, part_of
from cluster.engine.loading.model import LoadedModel, load_model
from cluster.engine.work import Work
from tests.support.choices import by_day
from tests.support.engine.driver import Factory, load_engine, rows, run
from tests.support.engine.parts import plain
from tests.support.errors import config_error

FEW = ["llama", "gemma3", "gpt-oss", "lfm2", "qwen3.5", "deepseek-v3"]
ARCHITECTURES = by_day(
    FEW,
    [*FEW, "phi3", "gemma4-large", "qwen3", "mixtral", "starcoder2", "gemma2"],
)
TEXT = token_array((np.arange(40) * 31 + 7) % 280)


def settings(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder), dtype="float32", device="cpu", num_pages=64, page_size=8, threads=1
    )


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, checkpoint_factory: Factory) -> Path:
    return checkpoint_factory(request.param)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Iterator[LoadedModel]:
    threads = torch.get_num_threads()
    yield load_model(settings(folder))
    torch.set_num_threads(threads)


def stepped(engine: Engine, text: TokenArray) -> torch.Tensor:
    found = rows(run(engine, Work("a", 0, text))).clone()
    engine.release("a")
    return found


def test_the_whole_model_goes_on_as_before_by_turns(folder: Path, whole: LoadedModel):
    all_of_it = tuple(range(len(whole.layers)))
    engine = Engine(settings(folder), whole)
    before = stepped(engine, TEXT)
    part = Engine(settings(folder), part_of(whole, (0, 2)))
    for _ in range(2):
        first = stepped(part, TEXT)
        torch.testing.assert_close(stepped(engine, TEXT), before, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(stepped(part, TEXT), first, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(before[0], plain(folder, all_of_it, TEXT), rtol=1e-4, atol=1e-4)


def test_works_whose_pass_of_the_first_layers_raised_are_not_lost(llama_folder: Path):
    engine = load_engine(llama_folder)
    first = FirstLayers(engine, part_of(engine.model, (0,)))
    first.submit(Work("a", 0, TEXT))
    first._forward = None
    with pytest.raises(TypeError):
        first.step()
    assert first.has_pending


def test_no_tensor_is_copied(whole: LoadedModel):
    part = part_of(whole, (0, 2))
    held = {each.data_ptr() for each in tensors(whole.module)}
    assert {each.data_ptr() for each in tensors(part.module)} <= held
    assert len(list(part.module.parameters())) < len(list(whole.module.parameters()))


def tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def test_a_model_whose_layers_stand_nowhere_together_is_refused(whole: LoadedModel):
    hidden = LoadedModel(
        torch.nn.Linear(2, 2), whole.source, "Odd", whole.layers, whole.device, 8, 8, (), 0
    )
    with config_error(r"Odd: some of its layers .* one list; remove"):
        part_of(hidden, (0,))


def test_layers_that_read_the_keys_of_others_cannot_be_taken_apart(
    checkpoint_factory: Factory,
):
    model = load_model(settings(checkpoint_factory("gemma4")))
    with config_error("some read the keys and values of others; remove the"):
        part_of(model, (0, 1, 2))
