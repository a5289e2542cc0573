"""What may be changed while the parts run, and what is said of anything else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.config.applications import POLICY
from cluster.config.file import load
from cluster.config.live import OPTIONS, READ_BY, changed, changed_drafter, check_told
from cluster.config.schema import (
    Config,
    CoordinatorConfig,
    DrafterConfig,
    DrafterPlacement,
    EngineConfig,
    TargetConfig,
)
from tests.conftest import serve_file
from tests.support.errors import config_error

CONFIG = Config(
    model_name="m", target=TargetConfig(engine=EngineConfig(model="m", adapters={"a": "/old"}))
)


def adapters(user_config: Any) -> dict[str, str]:
    return dict(changed(CONFIG, user_config).target.engine.adapters)


def test_a_list_stands_in_place_of_the_arguments_and_none_leaves_them():
    assert adapters({"adapters": {"b": "/new"}}) == {"b": "/new"}
    assert adapters({"adapters": {}}) == {}
    for nothing in (None, {}, {"adapters": None}):
        assert adapters(nothing) == {"a": "/old"}


def test_what_is_not_named_stays_as_it_is():
    settings = CoordinatorConfig(max_queued_requests=7)
    config = replace(CONFIG, coordinator=settings, tasks={"a": (), "b": ()})
    found = changed(
        config, {"coordinator": {"budget": "fixed"}, "tasks": {"c": []}, "ingress": None}
    )
    assert found.coordinator == replace(settings, budget="fixed")
    assert found.tasks == {"c": ()}, "a list of one's own is not made of two"
    assert found.ingress == config.ingress


def test_a_drafter_is_made_anew_by_its_own_keys():
    config = replace(CONFIG, drafters={"a": DrafterConfig(kind="suffix", nice=3)})
    found = changed_drafter(config, "a", {"options": {"min_match": 2}, "max_nodes": 5})
    wanted = DrafterConfig(kind="suffix", nice=3, options={"min_match": 2}, max_nodes=5)
    assert found.drafters["a"] == wanted
    assert changed_drafter(config, "a", None) == config
    with config_error(r"user_config\.nice: this key cannot change"):
        changed_drafter(config, "a", {"nice": 4})
    cascade = {"kind": "cascade", "options": {"stages": ["nobody", "somebody"]}}
    with config_error(r"drafters\.a\.options\.stages: no drafter is named"):
        changed_drafter(config, "a", cascade)


def test_a_drafter_inside_the_target_is_made_anew_by_its_options():
    inside, beside = DrafterPlacement(with_="target"), DrafterPlacement(num_cpus=1.0)
    config = replace(
        CONFIG,
        drafters={
            "a": DrafterConfig(kind="suffix", max_nodes=5, placement=inside),
            "b": DrafterConfig(kind="suffix", placement=beside),
            "c": DrafterConfig(kind="lm"),
        },
    )
    found = changed(config, {"drafters": {"a": {"options": {"min_match": 2}}}})
    assert found.drafters["a"] == replace(config.drafters["a"], options={"min_match": 2})
    assert found.drafters["b"] == config.drafters["b"]
    for told in ({"a": {"max_nodes": 2}}, {"b": {"options": {}}}):
        with config_error("only a drafter of another application"):
            changed(config, {"drafters": told})
    with config_error(r"drafters\.c: with these options no drafter of the"):
        changed(config, {"drafters": {"c": {"options": {"engine": {"device": "cpu"}}}}})
    only = {"drafters": {"a": {"options": {}}}}
    check_told({"target": only}, "f")
    check_told(dict.fromkeys(("ingress", "coordinator", "target"), only), "f")
    with config_error(r"told drafters\.a\.options and target reads it, too"):
        check_told({"ingress": only}, "f")


def test_every_key_that_is_read_while_the_parts_run_is_one_of_the_schema():
    for key in READ_BY.keys() - {"adapters", OPTIONS}:
        value = Config()
        for part in key.split("."):
            value = getattr(value, part)


def test_a_file_is_checked_with_what_its_deployments_say(tmp_path: Path):
    live = {"tasks": {"code": []}, "ingress": {"replicas": 2}, "adapters": {"b": "/new"}}
    policy = {"policy_function": POLICY}
    own = {
        "ingress": {"num_replicas": 2},
        "coordinator": {
            "autoscaling_config": {"max_replicas": 3, "policy": policy},
            "max_surge_percent": 100,
        },
        "target": {},
    }
    said = {name: {**options, "user_config": live} for name, options in own.items()}
    deployments = [{"name": name, **options} for name, options in said.items()]
    arguments = {"target": {"engine": {"model": "m"}}}
    loaded = load(serve_file(tmp_path, arguments, deployments=deployments))
    assert loaded.deployments == said
    config = loaded.config
    assert (config.tasks, config.ingress.replicas) == ({"code": ()}, 2)
    assert config.target.engine.adapters == {"b": "/new"}
