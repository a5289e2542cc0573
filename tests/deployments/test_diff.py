"""`drafthouse diff`: what a change restarts, as Ray Serve itself would decide."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeApplicationSchema

from cluster.config.applications import _DEPLOYMENT_KEYS
from cluster.config.file import _APPLICATION_KEYS, load
from deployments.applied import INSIDE, difference
from tests.config.test_refused import change
from tests.conftest import REPOSITORY, Run
from tests.support.errors import config_error

CASES = yaml.safe_load(Path(__file__).with_name("diff.yaml").read_text("utf-8"))


def changed(document: Any, changes: dict[str, Any]) -> Any:
    """A copy with other values, by their paths."""
    result = copy.deepcopy(document)
    main, pool = result["applications"]
    for path, value in changes.items():
        change({**result, "main": main, "pool": pool}, path, value)
        if "." not in path:
            result[path] = value
    return result


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["told"])
def test_a_changed_key_is_told_with_what_it_restarts(case: dict[str, Any]):
    before = changed(load("k8s/base/serve.yaml").document, case.get("before", {}))
    found = difference(before, changed(before, case["change"]))
    assert found.startswith(case["told"])
    # Whole outputs have all their lines.
    assert "\n  " not in case["told"] or found == case["told"]


def test_serve_itself_restarts_all_for_the_other_keys_of_an_application_alone():
    plain = ServeApplicationSchema(import_path="a:b")
    for key in {*_APPLICATION_KEYS} - {*INSIDE, "name", "deployments"}:
        changed = plain.model_copy(update={key: "c:d"})
        assert get_app_code_version(plain) != get_app_code_version(changed), key
    for key in {*_DEPLOYMENT_KEYS} - {"name"}:
        extra = DeploymentConfig.model_fields[key].json_schema_extra
        assert extra["update_type"].name != "HeavyWeight", key


def test_what_serve_does_not_take_is_refused_with_its_reason():
    document = load("k8s/base/serve.yaml").document
    scaled = {"name": "target", "autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}
    with config_error(r"deployments\[target\]: Ray Serve does not take it"):
        difference(document, changed(document, {"main.deployments": [scaled]}))


def test_what_stands_in_another_application_is_not_touched():
    document = changed(load("k8s/base/serve.yaml").document, {})
    other = document["applications"][0] | {"name": "other", "route_prefix": "/other"}
    document["applications"].append(copy.deepcopy(other))
    after = copy.deepcopy(document)
    after["applications"][2]["args"]["tasks"] = {}
    assert difference(document, after).startswith("restarts all of application other:")


def test_the_command_compares_two_files(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPOSITORY)
    local = "configs/tiny.yaml"
    text = Path(local).read_text("utf-8")
    new = tmp_path / "new.yaml"
    new.write_text(text.replace("max_running_sequences: 64", "max_running_sequences: 32"))
    found = run("diff", local, new)
    assert found.startswith("restarts all of application drafthouse: ")
    assert "  target.engine.max_running_sequences: 64 -> 32\n" in found
    new.write_text(text.replace("max_running_sequences", "max_running_sequence"))
    assert "did you mean max_running_sequences?" in run("diff", local, new, status=2)
