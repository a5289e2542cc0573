import pkgutil
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from cluster.config import schema
from cluster.config.parse import key_of, parse
from cluster.config.references import check
from cluster.config.schema import (
    Config,
    DrafterConfig,
    EngineConfig,
)
from cluster.draft.registry import KINDS
from tests.support.errors import config_error

MINIMAL = {"target": {"engine": {"model": "somewhere"}}}


def config_with(**sections: object) -> Config:
    return parse(Config, {**MINIMAL, **sections})


def test_what_is_left_out_or_empty_means_its_defaults():
    assert parse(Config, {}) == Config()
    assert parse(Config, {"target": None, "drafters": None, "tasks": None}) == Config()


def test_values_reach_their_fields():
    rule = {"load_from": 8, "class": "interactive", "task": "default", "max_draft_tokens": 2}
    config = parse(
        Config,
        {
            "model_name": "demo",
            "target": {"engine": {"model": "m", "dtype": "bfloat16", "threads": 2}},
            "drafters": {"lm": {"kind": "lm", "max_nodes": 8, "options": {"anything": [1, 2]}}},
            "tasks": {"code": ["lm"]},
            "coordinator": {"draft_length": {"kind": "window", "overrides": [rule]}},
        },
    )
    assert config.model_name == "demo"
    assert config.target.engine == EngineConfig(model="m", dtype="bfloat16", threads=2)
    assert config.drafters["lm"] == DrafterConfig(
        kind="lm", max_nodes=8, options={"anything": [1, 2]}
    )
    assert config.tasks == {"code": ("lm",)}
    (found,) = config.coordinator.draft_length.overrides
    assert (found.class_, found.load_from, found.max_draft_tokens) == ("interactive", 8, 2)


def test_a_rollout_inside_the_target_or_in_the_pool_is_taken():
    new = {"kind": "suffix", "rollout": {"replaces": "old"}}
    for placed, name in (({}, "residents"), ({"placement": {"num_cpus": 1}}, "pool")):
        config = config_with(drafters={"old": {"kind": "suffix", **placed}, "new": new | placed})
        check(config)
        assert getattr(config, name) == ("old", "new")
        assert config.rollouts["new"].replaces == "old"
        assert config.rollouts["new"].canary_share == 0.05


def test_an_integer_is_accepted_where_a_number_is_asked_for():
    fraction = parse(EngineConfig, {"memory_fraction": 1}).memory_fraction
    assert fraction == 1.0
    assert isinstance(fraction, float)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"tasks": {12.5: []}}, "tasks: the key that YAML reads as 12.5 is no text"),
        ({"coordinator": {"target_timeout_s": float("nan")}}, "nan is out of range"),
        (
            {"target": {"engine": {"model": "m", "adapters": {f"a{i}": "/x" for i in range(65)}}}},
            "target.engine.adapters: 65 adapters; at most 64 are served",
        ),
    ],
)
def test_what_no_file_would_say_is_refused_as_well(data: object, message: str):
    with config_error(message):
        check(parse(Config, data))


def test_none_is_accepted_where_the_schema_says_so():
    assert parse(EngineConfig, {"device_map": None}).device_map is None


def test_a_task_falls_back_to_the_default_list_and_then_to_every_drafter():
    drafters = {"a": {"kind": "lm"}, "b": {"kind": "prompt_lookup"}}
    every = config_with(drafters=drafters)
    assert every.drafters_of("code") == ("a", "b")
    listed = config_with(drafters=drafters, tasks={"default": ["b"], "code": ["a"]})
    assert listed.drafters_of("code") == ("a",)
    assert listed.drafters_of("unheard of") == ("b",)


def test_requests_may_name_no_class_that_goes_before_others_unless_the_operator_says_so():
    assert config_with().public_latency_classes == ("throughput",)
    allowed = config_with(ingress={"public_latency_classes": ["interactive"]})
    assert allowed.public_latency_classes == ("interactive",)


def test_a_server_that_is_off_takes_no_port():
    check(config_with(http={"port": 8265}, dashboard={"enabled": False}))


SECTIONS = [kind for name, kind in vars(schema).items() if name.endswith(("Config", "Placement"))]
OPTIONS = [pkgutil.resolve_name(kind.options) for kind in KINDS.values()]


@pytest.mark.parametrize("kind", SECTIONS, ids=lambda kind: kind.__name__)
def test_the_defaults_of_a_section_are_in_its_ranges(kind: type):
    def plain(section: Any) -> Any:
        """`section` as it would stand in a file."""
        if not is_dataclass(section):
            return section
        return {key_of(field): plain(getattr(section, field.name)) for field in fields(section)}

    assert parse(kind, plain(kind())) == kind()


@pytest.mark.parametrize("kind", [*SECTIONS, *OPTIONS], ids=lambda kind: kind.__name__)
def test_every_number_of_the_schema_has_a_range(kind: type):
    def check(hint: Any) -> None:
        assert hint not in (int, float)
        if get_origin(hint) is not Annotated:
            for part in get_args(hint):
                check(part)

    for hint in get_type_hints(kind, include_extras=True).values():
        check(hint)
