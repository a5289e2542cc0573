"""Every shipped configuration is read by the strict loader, by the registry and by Serve itself."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from ray.serve.schema import ServeDeploySchema

from cluster.config.file import load
from cluster.draft import registry
from deployments.placement import total_resources
from deployments.preflight import inspect
from tests.conftest import REPOSITORY
from tests.support.architectures import MAX_POSITIONS

FILES = sorted((REPOSITORY / "configs").glob("*.yaml"))
shipped = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


@shipped
def test_a_shipped_configuration_is_accepted_everywhere(path: Path):
    file = load(path)
    for name, drafter in file.config.drafters.items():
        registry.check(name, drafter)
    schema = ServeDeploySchema.model_validate(dict(file.document))
    application = schema.applications[0]
    module, _, attribute = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))
    # Nothing that Serve would ignore.
    assert set(file.document) <= set(ServeDeploySchema.model_fields)
    assert set(file.document["applications"][0]) <= set(type(application).model_fields)


@shipped
def test_a_shipped_configuration_is_for_one_machine_or_for_a_cluster(path: Path):
    """On one machine everything listens on loopback; a cluster has its own network."""
    config = load(path).config
    everywhere = config.http.host == "0.0.0.0"
    assert config.dashboard.host == "127.0.0.1"
    assert (config.network.interface == "node") == everywhere
    assert config.grpc.host == config.http.host in ("0.0.0.0", "127.0.0.1")


def test_the_recipe_of_the_documentation_is_accepted(tmp_path: Path):
    page = (REPOSITORY / "docs" / "own-model.md").read_text("utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (recipe,) = [each for each in blocks if "\n      drafters:" in each]
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    config = load(path).config
    for name, drafter in config.drafters.items():
        registry.check(name, drafter)
    assert total_resources(config)["GPU"] == 2


@pytest.mark.parametrize("architecture", ["llama", "gpt-oss", "gpt2"])
def test_ones_own_model_may_be_any_folder(
    architecture: str, checkpoint_factory: Callable[..., Path]
):
    folder = checkpoint_factory(architecture)
    # As the first lines of the file say.
    overrides = [f"target.engine.model={folder}"]
    config = load(REPOSITORY / "configs" / "own-model.yaml", overrides).config
    assert config.model_name == folder.name
    assert inspect(config, is_here=True)["target.engine"].described.max_context_len == MAX_POSITIONS


@pytest.mark.parametrize("name", ["local", "tiny"])
def test_a_demonstration_needs_neither_labels_nor_custom_resources(name: str):
    """`serve run` starts Ray without them."""
    config = load(REPOSITORY / "configs" / f"{name}.yaml").config
    placements = [
        config.target.placement,
        config.coordinator.placement,
        config.ingress.placement,
        *(config.drafters[name].reserved for name in config.pool),
    ]
    for placement in placements:
        assert not placement.labels
        assert not placement.resources
        assert placement.num_gpus == 0
    num_cpus = sum(placement.num_cpus for placement in placements)
    assert num_cpus <= 2, "the demonstration must fit a machine with two cores"


def test_the_drafters_of_the_pool_configuration_have_cores_of_their_own():
    config = load(REPOSITORY / "configs" / "pool.yaml").config
    assert config.pool == tuple(config.drafters)
    drafting = {core for drafter in config.drafters.values() for core in drafter.reserved.cores}
    assert drafting
    assert drafting.isdisjoint(config.target.placement.cores)
