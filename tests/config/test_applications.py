"""A file of two applications: the drafters have one of their own."""

from pathlib import Path
from typing import Any

import yaml

from cluster.config.applications import parse_pool
from cluster.config.file import ServeFile, load
from cluster.config.schema import DrafterPlacement
from deployments.app import build, build_pool
from tests.support.errors import config_error

POOL = {"application": "pool"}
DOCUMENT = {
    "applications": [
        {
            "name": "main",
            "import_path": "deployments.app:build",
            "args": {
                "target": {"engine": {"model": "m"}},
                "drafters": {
                    "inside": {"kind": "suffix"},
                    "lm": {"placement": POOL, "shadow": True},
                    "told": {"kind": "prediction", "placement": POOL},
                },
                "tasks": {"default": ["lm", "inside"]},
            },
        },
        {
            "name": "pool",
            "route_prefix": None,
            "import_path": "deployments.app:build_pool",
            "args": {
                "drafters": {
                    "lm": {"kind": "suffix", "placement": {"num_cpus": 2}},
                    "told": {"kind": "prediction"},
                }
            },
        },
    ]
}


def loaded(folder: Path, *overrides: str, places: slice = slice(None), **changed: Any) -> ServeFile:
    """Load some applications of the document.  changed: of the pool's."""
    main, pool = DOCUMENT["applications"]
    document = {"applications": [main, {**pool, **changed}][places]}
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(document))
    return load(path, overrides)


def test_a_configuration_has_the_drafters_of_both(tmp_path: Path):
    config = loaded(tmp_path).config
    assert config.residents == ("inside",)
    assert config.pool == ("lm", "told")
    lm = config.drafters["lm"]
    assert (lm.kind, lm.shadow, lm.placement) == ("suffix", True, DrafterPlacement(num_cpus=2))


def test_the_order_of_the_applications_is_free(tmp_path: Path):
    turned = loaded(tmp_path, places=slice(None, None, -1))
    assert turned.config == loaded(tmp_path).config
    assert [each["name"] for each in turned.document["applications"]] == ["main", "pool"]


def test_each_application_is_built_of_its_own_deployments():
    main, pool = (each["args"] for each in DOCUMENT["applications"])
    ingress = build(main)._bound_deployment
    coordinator = ingress.init_args[1]._bound_deployment
    assert coordinator.init_args[2] == []
    lm = build_pool(pool)._bound_deployment
    assert lm.name == "drafter-lm"
    assert [other._bound_deployment.name for other in lm.init_args[2]] == ["drafter-told"]


def test_an_override_goes_to_the_application_that_has_the_key(tmp_path: Path):
    own = ("drafters.lm.max_nodes=5", "drafters.inside.max_nodes=6")
    found = loaded(tmp_path, *own, "network.interface=node")
    assert [found.config.drafters[name].max_nodes for name in ("lm", "inside")] == [5, 6]
    main, pool = (each["args"] for each in found.document["applications"])
    assert "max_nodes" not in main["drafters"]["lm"]
    assert main["network"] == pool["network"] == {"interface": "node"}


def test_what_a_file_says_of_a_drafter_of_the_pool_counts(tmp_path: Path):
    given = {"user_config": {"max_nodes": 5}, "num_replicas": 2}
    found = loaded(tmp_path, deployments=[{"name": "drafter-lm", **given}])
    assert found.config.drafters["lm"].max_nodes == 5
    assert found.deployments == {"drafter-lm": given}


def test_a_replica_refuses_arguments_of_a_pool_that_break_a_rule():
    with config_error("'x' is a cascade"):
        parse_pool({"drafters": {"x": {"kind": "cascade", "options": {"stages": ["x"]}}}})
