"""Adapters that peft itself made: in one batch, the greedy texts are those of peft's own model; and
where they come and go under running sequences, every text is that of one content."""

import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from cluster.config.schema import EngineConfig
from cluster.engine.engine import Engine, Work
from cluster.engine.loading.peft_folder import AdapterFolder, read_adapters
from cluster.errors import NotFoundError
from tests.support.choices import by_day
from tests.support.engine.adapters import ATTENTION, EVERYTHING, write_adapter
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
from tests.support.errors import config_error

NUM_PROMPTS = by_day(12, 50)
NUM_TOKENS = 16
CONFIGS = {
    "everything": {"r": 4, "lora_alpha": 16, "target_modules": list(EVERYTHING)},
    "attention": {"r": 3, "lora_alpha": 24, "target_modules": list(ATTENTION)},
    "rslora": {
        "r": 9,
        "lora_alpha": 12,
        "use_rslora": True,
        "target_modules": ["up_proj", "q_proj"],
        "rank_pattern": {"q_proj": 2},
        "layers_to_transform": [0, 2],
    },
}


def make(base: Path, folder: Path, seed: int, *, is_served: bool = True, **settings: Any) -> Path:
    """An adapter with weights drawn by peft, saved by peft."""
    torch.manual_seed(seed)
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    model = get_peft_model(load_oracle(base), config)
    with torch.no_grad():
        # peft's first weights hardly change a text.
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight *= 3.0
    how = {"save_embedding_layers": False} if is_served else {}
    model.save_pretrained(folder, **how)
    return folder


def adapted(base: Path, folder: Path | str) -> Any:
    """peft's own model."""
    return PeftModel.from_pretrained(load_oracle(base), folder).eval()


@pytest.fixture(scope="module")
def folders(native_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("peft")
    return {
        name: str(make(native_llama, root / name, seed, **settings))
        for seed, (name, settings) in enumerate(CONFIGS.items())
    }


def test_fifty_greedy_texts_of_three_adapters_in_one_batch_are_those_of_peft(
    native_llama: Path, folders: dict[str, str]
):
    """With and without drafts."""
    prompts = {str(index): prompt(5 + index % 9, seed=index) for index in range(NUM_PROMPTS)}
    chosen = {name: 1 + index % 3 for index, name in enumerate(prompts)}
    models = [adapted(native_llama, each) for each in folders.values()]
    texts = {
        name: generate(models[chosen[name] - 1], prompts[name], NUM_TOKENS) for name in prompts
    }
    for generator in (None, np.random.default_rng(1)):
        engine = load_engine(native_llama, adapters=folders, num_pages=1024)
        decoder = GreedyDecoder(engine, prompts, NUM_TOKENS, generator, texts, chosen)
        assert decoder.run() == texts
        assert (decoder.num_accepted > 0) == (generator is not None)
    plain = load_oracle(native_llama)
    changed = [texts[name] != generate(plain, prompts[name], NUM_TOKENS) for name in prompts]
    assert np.mean(changed) > 0.8, "the adapters change too little for the test to fail"


def test_an_adapter_of_a_whole_model_serves_the_part_of_its_text(
    checkpoint_factory: Factory, tmp_path: Path
):
    base = checkpoint_factory("mistral3")
    layers = r".*language_model.*\.(q_proj|v_proj|up_proj)"
    folder = make(base, tmp_path / "whole", 0, r=4, lora_alpha=16, target_modules=layers)
    text = generate(adapted(base, folder), prompt(9), NUM_TOKENS)
    assert text != generate(load_oracle(base), prompt(9), NUM_TOKENS)
    engine = load_engine(base, adapters={"whole": str(folder)})
    decoder = GreedyDecoder(engine, {"a": prompt(9)}, NUM_TOKENS, adapters={"a": 1})
    assert decoder.run() == {"a": text}


def test_embedding_layers_in_a_folder_are_refused_with_the_remedy(
    native_llama: Path, tmp_path: Path
):
    folder = make(native_llama, tmp_path / "whole", 0, is_served=False, **CONFIGS["everything"])
    with config_error(r"whole embedding layer.*save_embedding_layers=False"):
        load_engine(native_llama, adapters={"whole": str(folder)})


@pytest.fixture(scope="module")
def old(folders: dict[str, str]) -> Path:
    return Path(folders["everything"])


@pytest.fixture(scope="module")
def new(native_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(native_llama, tmp_path_factory.mktemp("new") / "a", 2, **CONFIGS["everything"])


@pytest.fixture
def engine(native_llama: Path, old: Path) -> Engine:
    return load_engine(native_llama, adapters={"a": str(old)})


def read(base: Path, **folders: Path) -> dict[str, AdapterFolder]:
    adapters = {name: str(folder) for name, folder in folders.items()}
    return read_adapters(EngineConfig(model=str(base), adapters=adapters))


def test_a_running_text_keeps_its_adapter_and_a_later_one_has_the_new_one(
    native_llama: Path, old: Path, new: Path, engine: Engine
):
    text = prompt(9)
    prompts = {"first": text, "second": text}
    chosen = {"first": engine.adapters.index_of("a")}
    decoder = GreedyDecoder(engine, prompts, NUM_TOKENS, adapters=chosen)
    weights = [weakref.ref(pair.down) for _, pair in engine.adapters.loaded[1].parts.values()]
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
    first, second = (generate(adapted(native_llama, each), text, NUM_TOKENS) for each in (old, new))
    assert (decoder.text("first"), decoder.text("second")) == (first, second)
    assert first != second, "the test could not fail"
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
    folder = shutil.copytree(old, tmp_path / "a")
    engine = load_engine(native_llama, adapters={"a": str(folder)})
    shutil.copy(new / "adapter_model.safetensors", folder)
    engine.model.adapters.serve(read(native_llama, a=folder))
    assert engine.adapters.index_of("a") == 2
    decoder = GreedyDecoder(engine, {"x": prompt(9)}, NUM_TOKENS, adapters={"x": 2})
    assert decoder.run() == {"x": generate(adapted(native_llama, new), prompt(9), NUM_TOKENS)}


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
    with config_error(r"adapter 'b' cannot be served.*another model's"):
        engine.model.adapters.serve(read(native_llama, a=new, b=misfit))
    assert engine.adapters is before
    assert engine.adapters.names == ("a",)
