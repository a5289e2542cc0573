"""What of a running target may be changed, and what is said of anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config.file import load
from cluster.config.schema import Config, EngineConfig, TargetConfig
from cluster.errors import ConfigError

CONFIG = Config(
    model_name="m", target=TargetConfig(engine=EngineConfig(model="m", adapters={"a": "/old"}))
)


def adapters(user_config: Any) -> dict[str, str]:
    return dict(CONFIG.changed(user_config).target.engine.adapters)


def test_a_list_stands_in_place_of_the_arguments_and_none_leaves_them() -> None:
    assert adapters({"adapters": {"b": "/new"}}) == {"b": "/new"}
    assert adapters({"adapters": {}}) == {}
    for nothing in (None, {}, {"adapters": None}):
        assert adapters(nothing) == {"a": "/old"}


@pytest.mark.parametrize(
    ("user_config", "reason"),
    [
        ({"adaptors": {}}, "did you mean adapters"),
        ({"adapters": ["/new"]}, r"user_config\.adapters"),
        ({"adapters": {"b": 3}}, r"user_config\.adapters\.b"),
        ({"adapters": {"b": "new"}}, "'new' is a relative path"),
        ({"adapters": {"m": "/new"}}, "may not be the model's own"),
        ({"adapters": {"b@1": "/new"}}, "an adapter's name may hold"),
    ],
)
def test_anything_else_is_refused_by_name(user_config: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        CONFIG.changed(user_config)


def written(folder: Path, deployments: Any) -> Path:
    application = {
        "import_path": "deployments.app:build",
        "args": {"target": {"engine": {"model": "m"}}},
        "deployments": deployments,
    }
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump({"applications": [application]}))
    return file


def test_a_file_is_checked_with_what_its_deployments_say(tmp_path: Path) -> None:
    live = {"adapters": {"b": "/new"}}
    loaded = load(written(tmp_path, [{"name": "target", "user_config": live}]))
    assert loaded.deployments == {"target": {"user_config": live}}
    assert loaded.config.target.engine.adapters == {"b": "/new"}
    assert load(written(tmp_path, [])).deployments == {}


def test_how_many_replicas_run_may_be_said_of_each_deployment(tmp_path: Path) -> None:
    scaled = {"autoscaling_config": {"max_replicas": 3}, "max_surge_percent": 100}
    named = [{"name": "coordinator", **scaled}, {"name": "target", "num_replicas": 2}]
    assert load(written(tmp_path, named)).deployments == {
        "coordinator": scaled, "target": {"num_replicas": 2},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("deployments", "named"),
    [
        ([{"name": "ingress", "user_config": {}}], "ingress takes none; only target does"),
        ([{"name": "target", "num_cpus": 2}], r"deployments\[0\].num_cpus"),
        ([{"name": "target"}, {"name": "target"}], "'target' stands twice"),
        ([{"name": "coordinators"}], "did you mean coordinator?"),
        ({"name": "target"}, "a list of deployments"),
        ([{"name": "target", "user_config": {"x": 1}}], r"deployments\[0\].user_config.x"),
    ],
)
def test_what_serve_would_override_otherwise_is_refused(
    tmp_path: Path, deployments: Any, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load(written(tmp_path, deployments))
