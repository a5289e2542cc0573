"""Adapters: in any batch, the text of each is that of the model with it merged into its weights."""

import itertools
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config.schema import EngineConfig
from cluster.engine.engine import Engine, Work
from cluster.engine.loading.inspection import check_loadable
from cluster.engine.memory.sequence import Sequence
from cluster.engine.schedule.batch import Pick, build_batch
from tests.support.engine.adapters import ATTENTION, EVERYTHING, merged_oracle, write_adapter
from tests.support.engine.driver import (
    TREE,
    check_rows,
    load_engine,
    load_oracle,
    prompt,
    rows,
    run,
)
from tests.support.engine.integrity import check_integrity
from tests.support.engine.taps import expected_taps
from tests.support.errors import config_error


@pytest.fixture(scope="module")
def adapters(native_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of different layers, ranks and scalings."""
    root = tmp_path_factory.mktemp("adapters")
    kinds = {
        "all": {"targets": EVERYTHING, "rank": 4},
        "attention": {"targets": ATTENTION, "rank": 2},
        "scaled": {
            "targets": ("q_proj", "up_proj"),
            "rank": 9,
            "lora_alpha": 5,
            "use_rslora": True,
        },
    }
    return {
        name: str(write_adapter(native_llama, root / name, seed=seed, **kind))
        for seed, (name, kind) in enumerate(kinds.items(), 1)
    }


@pytest.fixture(scope="module")
def engine(native_llama: Path, adapters: dict[str, str]) -> Engine:
    return load_engine(native_llama, adapters=adapters)


def test_no_adapter_uses_the_prefixes_of_another(native_llama: Path, adapters: dict[str, str]):
    engine = load_engine(native_llama, adapters=adapters)
    text = prompt(33)
    merged = [merged_oracle(native_llama, Path(each)) for each in adapters.values()]
    for index, oracle in enumerate([load_oracle(native_llama), *merged]):
        name = f"first-{index}"
        check_rows(run(engine, Work(name, 0, text, adapter=index)), oracle, text, bound=1e-4)
        assert engine.last_step.num_prefix_hit_tokens == 0
        engine.release(name)
    for index in range(4):
        run(engine, Work(f"second-{index}", 0, text, adapter=index))
        assert engine.last_step.num_prefix_hit_tokens == 32
    check_integrity(engine)


def test_a_request_that_changes_its_adapter_begins_anew(engine: Engine):
    run(engine, Work("a", 0, prompt(9), adapter=1))
    assert run(engine, Work("a", 9, prompt(1), adapter=2)).have_len == 0
    engine.release("a")


def _settings(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def _tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return changed


def _first(tensors: dict[str, torch.Tensor], side: str) -> str:
    return next(key for key in sorted(tensors) if key.endswith(f"lora_{side}.weight"))


def _grow(tensors: dict[str, torch.Tensor]) -> None:
    key = _first(tensors, "A")
    tensors[key] = torch.zeros(tensors[key].shape[0], 7)


def _renamed(part: str, other: str) -> Callable[[Path], None]:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.replace(part, other)] = tensors.pop(key)

    return _tensors(rename)


def _break(tensors: dict[str, torch.Tensor]) -> None:
    tensors[_first(tensors, "B")].fill_(float("nan"))


MISFITS = {
    "peft_type": (_settings(peft_type="IA3"), "peft_type is 'IA3'"),
    "dora": (_settings(use_dora=True), "use_dora is True"),
    "bias": (_settings(bias="all"), "bias is 'all'"),
    "saved modules": (_settings(modules_to_save=["lm_head"]), "modules_to_save"),
    "alpha pattern": (_settings(alpha_pattern={"q_proj": 3}), "alpha_pattern"),
    "first weights": (_settings(init_lora_weights="pissa"), "'pissa'"),
    "unknown setting": (_settings(use_magic=1), "use_magic is 1"),
    "alpha": (_settings(lora_alpha="8"), "lora_alpha is '8'"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "cannot be read"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "safetensors"),
    "no tensors": (_tensors(dict.clear), "no weights"),
    "half a pair": (_tensors(lambda t: t.pop(_first(t, "B"))), "but one of lora_A"),
    "another tensor": (_tensors(lambda t: t.update(x=torch.ones(1))), "'x' is no part"),
    "not finite": (_tensors(_break), "not finite"),
    "another size": (_tensors(_grow), "another model's adapter"),
    "another name": (_renamed("q_proj", "query"), "no linear layer"),
    # As for a model of texts and images that holds this one, and for the model without its head.
    "a longer prefix": (
        _renamed("model.model.", "model.model.language_model."),
        "no linear layer 'language_model.",
    ),
    "a shorter prefix": (_renamed("model.model.", "model."), "no linear layer 'layers."),
}


@pytest.mark.parametrize(("spoil", "reason"), MISFITS.values(), ids=MISFITS.keys())
def test_a_misfit_is_refused_by_name_and_reason(
    native_llama: Path,
    adapters: dict[str, str],
    tmp_path: Path,
    spoil: Callable[[Path], None],
    reason: str,
):
    """By the check, and at load."""
    folder = shutil.copytree(adapters["attention"], tmp_path / "bad")
    spoil(folder)
    own = {"bad": str(folder)}
    config = EngineConfig(model=str(native_llama), adapters=own)
    for load in (
        partial(check_loadable, native_llama, config, is_here=True),
        partial(load_engine, native_llama, adapters=own),
    ):
        with config_error("adapter 'bad' cannot be served", "adapters.bad") as caught:
            load()
        assert reason in caught.value.message


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_adapter_rank": 3}, "has rank 4, the limit is 3"),
        ({"reproducible": True}, "reproducible True"),
        ({"tensor_parallel": 2}, "tensor_parallel 2"),
    ],
)
def test_what_adapters_cannot_be_combined_with(
    native_llama: Path, adapters: dict[str, str], settings: dict[str, Any], reason: str
):
    with config_error(reason):
        load_engine(native_llama, adapters=adapters, **settings)


def test_taps_of_a_step_with_adapters_are_those_of_the_adapted_model(
    native_llama: Path, adapters: dict[str, str], engine: Engine
):
    text = prompt(9, seed=77)
    engine.submit(Work("tapped", 0, text, adapter=1))
    engine.step(taps=(1, -1))
    expected = expected_taps(merged_oracle(native_llama, Path(adapters["all"])), text, (1, -1))
    torch.testing.assert_close(engine.last_step.taps.rows, expected, atol=1e-4, rtol=1e-4)
    engine.release("tapped")


def test_rows_of_an_adapter_do_not_depend_on_its_neighbours(engine: Engine):
    alone = {}
    for index in range(4):
        alone[index] = rows(run(engine, Work("x", 0, prompt(7, seed=index), TREE, adapter=index)))
        engine.release("x")
    for order in [*itertools.permutations(range(4))][::4]:
        for index in order:
            engine.submit(Work(str(index), 0, prompt(7, seed=index), TREE, adapter=index))
        for output in engine.step():
            expected = alone[int(output.request_id)]
            torch.testing.assert_close(rows(output), expected, atol=1e-4, rtol=1e-4)
            engine.release(output.request_id)


def test_every_row_of_a_work_has_its_adapter():
    def pick(name: str, adapter: int) -> Pick:
        work = Work(name, 0, prompt(3), TREE, adapter=adapter)
        sequence = Sequence(name, 0, 16)
        sequence.tables[0].add(0)
        return Pick(sequence, work, 3, True)

    shape = {"min_rows": 16, "scratch_slot": 0, "max_context_len": 64}
    batch = build_batch([pick("a", 0), pick("b", 2)], **shape)
    assert batch.adapters.tolist() == [0] * 7 + [2] * 7 + [0] * 2
    assert build_batch([pick("a", 0)], **shape).adapters is None
