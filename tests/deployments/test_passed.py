"""A model that has passed is not looked at again, and one that may be another is."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.config.doors import AccessConfig
from cluster.config.schema import Config, EngineConfig, TargetConfig
from cluster.errors import ConfigError
from deployments.asked import inspect_what_is_new
from tests.conftest import python
from tests.support.engine.adapters import write_adapter

START = """
import sys
from cluster.config.schema import Config, EngineConfig, TargetConfig
from deployments.asked import inspect_what_is_new
config = Config(target=TargetConfig(EngineConfig(model=sys.argv[1])))
inspect_what_is_new(config, is_here=True)
print(*{"torch", "transformers", "ray", "huggingface_hub"}.intersection(sys.modules))
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("DRAFTHOUSE_MODELS", str(tmp_path / "cache"))
    return tmp_path / "cache"


def look(model: Path, *, is_here: bool = True, **engine: Any) -> None:
    """Look at a target, unless it has passed."""
    target = TargetConfig(EngineConfig(model=str(model), **engine))
    inspect_what_is_new(Config(target=target), is_here=is_here)


def num_looks(cache: Path) -> int:
    """Each look that found nothing wrong leaves a line."""
    return len((cache / "passed").read_text().split())


def test_a_start_that_changes_nothing_imports_neither_torch_nor_transformers(model: Path):
    look(model)
    imported = python("-c", START, model)
    assert (imported.returncode, imported.stdout.split()) == (0, []), imported.stderr


def test_only_what_may_be_another_model_is_looked_at_again(
    model: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    look(model)
    assert "checking the models" in capsys.readouterr().err
    for each in (other, model, other):
        look(each)
    assert num_looks(cache) == 2
    capsys.readouterr()
    look(model)
    assert capsys.readouterr().err == ""
    # Of the same size, and as old as before by its own word.
    file = model / "tokenizer_config.json"
    before = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    look(model)
    look(model, is_here=False)
    assert num_looks(cache) == 4


def cut_weights(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def change_shape(model: Path) -> None:
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**described, "intermediate_size": 8}))


@pytest.mark.parametrize("damage", [cut_weights, change_shape])
def test_a_model_that_is_damaged_later_is_refused_each_time(
    model: Path, damage: Callable[[Path], None]
):
    look(model)
    damage(model)
    for _ in range(2):
        with pytest.raises(ConfigError) as refused:
            look(model)
        assert refused.value.param == "target.engine.model"


def test_a_folder_that_is_named_anywhere_counts(model: Path, tmp_path: Path):
    adapter = tmp_path / "adapter"
    write_adapter(model, adapter)
    look(model, adapters={"pirate": str(adapter)})
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(ConfigError):
        look(model, adapters={"pirate": str(adapter)})


def test_settings_are_checked_each_time(model: Path, tmp_path: Path):
    look(model)
    target = TargetConfig(EngineConfig(model=str(model)))
    bad = Config(target=target, access=AccessConfig(str(tmp_path / "no")))
    with pytest.raises(ConfigError, match="keys_file"):
        inspect_what_is_new(bad, is_here=True)


def test_a_disk_that_cannot_be_written_costs_time_alone(model: Path, cache: Path):
    cache.write_text("a file")
    for _ in range(2):
        look(model)
    assert cache.read_text() == "a file"
