"""Every shipped configuration is read by the strict loader, by the registry and by Serve itself."""

import importlib
from pathlib import Path

import pytest
from ray.serve.schema import ServeDeploySchema

from cluster.config_file import load
from cluster.draft import registry

REPOSITORY = Path(__file__).resolve().parents[1]
FILES = sorted((REPOSITORY / "configs").glob("*.yaml"))


def test_the_promised_configurations_are_there() -> None:
    assert {"local.yaml", "llama-70b-8xh100.yaml", "two-node.yaml"} <= {f.name for f in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_configuration_is_accepted_everywhere(path: Path) -> None:
    file = load(path)
    for name, drafter in file.config.drafters.items():
        registry.check(name, drafter)
    schema = ServeDeploySchema.model_validate(dict(file.document))
    module, _, attribute = schema.applications[0].import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_configuration_says_nothing_that_serve_would_ignore(path: Path) -> None:
    document = load(path).document
    schema = ServeDeploySchema.model_validate(dict(document))
    assert set(document) <= set(ServeDeploySchema.model_fields)
    for section in ("http_options", "grpc_options"):
        assert set(document[section]) <= set(type(getattr(schema, section)).model_fields)
    assert set(document["applications"][0]) <= set(type(schema.applications[0]).model_fields)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_configuration_is_for_one_machine_or_for_a_cluster(path: Path) -> None:
    """On one machine everything listens on loopback; a cluster has its own network."""
    config = load(path).config
    everywhere = config.http.host == "0.0.0.0"
    assert config.dashboard.host == "127.0.0.1"
    assert (config.network.interface == "node") == everywhere
    assert (config.grpc.listener == "serve") == everywhere
    assert everywhere or (config.http.host, config.grpc.host) == ("127.0.0.1", "127.0.0.1")


def test_the_local_configuration_needs_neither_labels_nor_custom_resources() -> None:
    """`serve run` starts Ray without them."""
    config = load(REPOSITORY / "configs" / "local.yaml").config
    placements = [
        config.target.placement,
        config.coordinator.placement,
        config.ingress.placement,
        *(drafter.placement for drafter in config.drafters.values()),
    ]
    for placement in placements:
        assert not placement.labels
        assert not placement.resources
        assert placement.num_gpus == 0
    num_cpus = sum(placement.num_cpus for placement in placements)
    assert num_cpus <= 2, "the demonstration must fit a machine with two cores"
