"""A model that has passed is not looked at again, and one that may be another is."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config.schema import Config, DrafterConfig, EngineConfig, TargetConfig
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


def served(model: Path, **drafters: DrafterConfig) -> Config:
    return Config(target=TargetConfig(EngineConfig(model=str(model))), drafters=drafters)


def num_looks(cache: Path) -> int:
    """Each look that found nothing wrong leaves a line."""
    return len((cache / "passed").read_text().split())


def test_a_start_that_changes_nothing_imports_neither_torch_nor_transformers(model: Path):
    inspect_what_is_new(served(model), is_here=True)
    imported = python("-c", START, model)
    assert (imported.returncode, imported.stdout.split()) == (0, []), imported.stderr


def test_only_what_may_be_another_model_is_looked_at_again(
    model: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
):
    first, other = served(model), served(Path(shutil.copytree(model, tmp_path / "other")))
    inspect_what_is_new(first, is_here=True)
    assert "checking the models" in capsys.readouterr().err
    for config in (other, first, other):
        inspect_what_is_new(config, is_here=True)
    assert num_looks(cache) == 2
    capsys.readouterr()
    inspect_what_is_new(first, is_here=True)
    assert capsys.readouterr().err == ""
    # Of the same size, and as old as before by its own word.
    file = model / "tokenizer_config.json"
    before = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    inspect_what_is_new(first, is_here=True)
    inspect_what_is_new(first, is_here=False)
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
    inspect_what_is_new(served(model), is_here=True)
    damage(model)
    for _ in range(2):
        with pytest.raises(ConfigError) as refused:
            inspect_what_is_new(served(model), is_here=True)
        assert refused.value.param == "target.engine.model"


def test_a_folder_that_is_named_anywhere_counts(model: Path, tmp_path: Path):
    adapter = tmp_path / "adapter"
    write_adapter(model, adapter)
    engine = EngineConfig(model=str(model), adapters={"pirate": str(adapter)})
    config = Config(target=TargetConfig(engine))
    inspect_what_is_new(config, is_here=True)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(ConfigError):
        inspect_what_is_new(config, is_here=True)


def test_settings_are_checked_each_time(model: Path, tmp_path: Path):
    config = served(model)
    inspect_what_is_new(config, is_here=True)
    bad = Config(target=config.target, access=type(config.access)(keys_file=str(tmp_path / "no")))
    with pytest.raises(ConfigError, match="keys_file"):
        inspect_what_is_new(bad, is_here=True)


def test_a_disk_that_cannot_be_written_costs_time_alone(model: Path, cache: Path):
    cache.write_text("a file")
    for _ in range(2):
        inspect_what_is_new(served(model), is_here=True)
    assert cache.read_text() == "a file"
