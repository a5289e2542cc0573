"""Adapters that come and go under running sequences: every text is that of one content."""

import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from cluster.config.schema import EngineConfig
from cluster.engine.engine import Engine, Work
from cluster.engine.loading.peft_folder import AdapterFolder, read_adapters
from cluster.errors import ConfigError, NotFoundError
from tests.engine.test_adapters_of_peft import CONFIGS, make
from tests.support.engine.adapters import ATTENTION, write_adapter
from tests.support.engine.driver import (
    Factory,
    GreedyDecoder,
    generate,
    load_engine,
    load_oracle,
    prompt,
    run,
)
from tests.support.engine.integrity import check_integrity

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def old(native_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(native_llama, tmp_path_factory.mktemp("old") / "a", 1, **CONFIGS["everything"])


@pytest.fixture(scope="module")
def new(native_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(native_llama, tmp_path_factory.mktemp("new") / "a", 2, **CONFIGS["everything"])


@pytest.fixture
def engine(native_llama: Path, old: Path) -> Engine:
    return load_engine(native_llama, adapters={"a": str(old)})


def read(base: Path, **folders: Path) -> dict[str, AdapterFolder]:
    adapters = {name: str(folder) for name, folder in folders.items()}
    return read_adapters(EngineConfig(model=str(base), adapters=adapters))


def of_peft(base: Path, folder: Path, text: Any) -> list[int]:
    return generate(PeftModel.from_pretrained(load_oracle(base), folder).eval(), text, NUM_TOKENS)


def weights_of(engine: Engine, index: int) -> list[weakref.ref[torch.Tensor]]:
    parts = engine.adapters.loaded[index].parts.values()
    return [weakref.ref(pair.down) for _, pair in parts]


def test_a_running_text_keeps_its_adapter_and_a_later_one_has_the_new_one(
    native_llama: Path, old: Path, new: Path, engine: Engine
):
    prompts = {"first": prompt(9, seed=1), "second": prompt(9, seed=1)}
    chosen = {"first": engine.adapters.index_of("a")}
    decoder = GreedyDecoder(engine, prompts, NUM_TOKENS, adapters=chosen)
    weights = weights_of(engine, 1)
    decoder.start("first")
    for _ in range(4):
        decoder.step()
    began_with = engine.adapters.references[0]
    engine.model.adapters.serve(read(native_llama, a=new))
    chosen["second"] = engine.adapters.index_of("a")
    assert chosen == {"first": 1, "second": 2}, "an index is never given twice"
    assert engine.adapters.index_of(began_with) == 1, "a running request finds its own again"
    decoder.start("second")
    while engine.has_pending:
        assert 0 < len(decoder.text("first")) <= NUM_TOKENS
        decoder.step()
        engine.drop_unused_adapters()
    expected = {
        "first": of_peft(native_llama, old, prompts["first"]),
        "second": of_peft(native_llama, new, prompts["second"]),
    }
    assert {name: decoder.text(name) for name in prompts} == expected
    assert expected["first"] != expected["second"], "the test could not fail"
    # The last sequence of the old one has ended, and nothing holds its weights.
    assert engine.adapters.loaded.keys() == {2}
    assert all(weight() is None for weight in weights)
    with pytest.raises(NotFoundError, match="'a' has been replaced"):
        engine.adapters.index_of(began_with)


def test_weights_stay_while_a_request_waits_or_holds_its_cache(
    native_llama: Path, new: Path, engine: Engine
):
    engine.submit(Work("waits", 0, prompt(9), adapter=1))
    engine.model.adapters.serve({})
    for _ in range(2):
        engine.drop_unused_adapters()
        assert 1 in engine.adapters, "before its step, and while it may go on"
        engine.step()
    assert engine.adapters.names == ()
    engine.release("waits")
    engine.drop_unused_adapters()
    assert 1 not in engine.adapters


def test_a_reload_never_uses_the_pages_of_another_content(
    native_llama: Path, old: Path, new: Path, engine: Engine
):
    text = prompt(33)

    def hits(name: str) -> int:
        run(engine, Work(name, 0, text, adapter=engine.adapters.index_of("a")))
        engine.release(name)
        engine.drop_unused_adapters()
        return engine.last_step.num_prefix_hit_tokens

    assert hits("cold") == 0
    assert hits("warm") == 32
    engine.model.adapters.serve(read(native_llama, a=old))
    assert hits("the same content") == 32
    engine.model.adapters.serve(read(native_llama, a=new))
    assert hits("another content") == 0
    engine.model.adapters.serve(read(native_llama, a=old))
    assert hits("the first one, which was freed") == 0
    check_integrity(engine)


def test_weights_that_were_written_over_in_their_folder_are_another_content(
    native_llama: Path, old: Path, new: Path, tmp_path: Path
):
    folder = tmp_path / "a"
    shutil.copytree(old, folder)
    engine = load_engine(native_llama, adapters={"a": str(folder)})
    shutil.copy(new / "adapter_model.safetensors", folder)
    engine.model.adapters.serve(read(native_llama, a=folder))
    index = engine.adapters.index_of("a")
    assert index == 2
    decoder = GreedyDecoder(engine, {"x": prompt(9)}, NUM_TOKENS, adapters={"x": index})
    assert decoder.run() == {"x": of_peft(native_llama, new, prompt(9))}


def test_a_misfit_leaves_all_as_it_was(
    native_llama: Path,
    old: Path,
    new: Path,
    tmp_path: Path,
    checkpoint_factory: Factory,
    engine: Engine,
):
    other = checkpoint_factory("llama", hidden_size=96)
    misfit = write_adapter(other, tmp_path / "misfit", ATTENTION)
    before = engine.adapters
    with pytest.raises(ConfigError, match=r"adapter 'b' cannot be served.*another model's"):
        engine.model.adapters.serve(read(native_llama, a=new, b=misfit))
    assert engine.adapters is before
    assert engine.adapters.names == ("a",)
