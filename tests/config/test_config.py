import dataclasses
import pkgutil
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from cluster.config import schema
from cluster.config.parse import key_of, parse
from cluster.config.schema import (
    Config,
    DrafterConfig,
    EngineConfig,
)
from cluster.draft.registry import KINDS
from cluster.errors import ConfigError

MINIMAL = {"target": {"engine": {"model": "somewhere"}}}


def config_with(**sections: object) -> Config:
    return parse(Config, {**MINIMAL, **sections})


def test_an_empty_mapping_gives_the_defaults() -> None:
    assert parse(Config, {}) == Config()


def test_values_reach_their_fields() -> None:
    config = parse(
        Config,
        {
            "model_name": "demo",
            "target": {"engine": {"model": "m", "dtype": "bfloat16", "threads": 2}},
            "drafters": {"lm": {"kind": "lm", "max_nodes": 8, "options": {"anything": [1, 2]}}},
            "tasks": {"code": ["lm"]},
        },
    )
    assert config.model_name == "demo"
    assert config.target.engine == EngineConfig(model="m", dtype="bfloat16", threads=2)
    assert config.drafters["lm"] == DrafterConfig(
        kind="lm", max_nodes=8, options={"anything": [1, 2]}
    )
    assert config.tasks == {"code": ("lm",)}


def test_an_integer_is_accepted_where_a_number_is_asked_for() -> None:
    fraction = parse(EngineConfig, {"memory_fraction": 1}).memory_fraction
    assert fraction == 1.0
    assert isinstance(fraction, float)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"drafters": {"lm": {"max_node": 3}}}, "drafters.lm.max_node: unknown key (did you mean"),
        ({"modelname": "x"}, "modelname: unknown key (did you mean model_name?)"),
        ({"zzz": 1}, "zzz: unknown key (known keys: model_name, target"),
        ({"model_name": 3}, "model_name: 3 is not a string; put it in quotes"),
        ({"tasks": {12.5: []}}, "tasks: the key that YAML reads as 12.5 is no text"),
        ({"coordinator": {"max_draft_tokens": "16"}}, "'16' is not an integer"),
        ({"coordinator": {"max_draft_tokens": True}}, "True is not an integer"),
        ({"coordinator": {"max_draft_tokens": 1.5}}, "1.5 is not an integer"),
        ({"dashboard": {"enabled": 1}}, "dashboard.enabled: 1 is not true or false"),
        ({"target": {"engine": {"dtype": "fp8"}}}, "'fp8' is none of: auto, float32"),
        (
            {"drafters": {"lm": {"placement": {"with": "targt"}}}},
            "drafters.lm.placement.with: 'targt' is none of: target",
        ),
        ({"drafters": {"lm": {"placement": "pool"}}}, "'pool' is not auto or a mapping"),
        ({"target": []}, "target: [] is not a mapping"),
        ({"drafters": ["lm"]}, "drafters: ['lm'] is not a mapping"),
        ({"tasks": {"code": "lm"}}, "tasks.code: 'lm' is not a list"),
        ({"tasks": {"code": ["lm", 3]}}, "tasks.code[1]: 3 is not a string"),
        ({"target": {"placement": {"resources": {"a": "b"}}}}, "resources.a: 'b' is not a number"),
    ],
)
def test_every_deviation_names_its_path_and_the_remedy(data: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Config, data)
    assert message in caught.value.message
    assert caught.value.param is not None
    assert caught.value.message.startswith(caught.value.param)


def test_a_block_that_was_left_empty_means_its_defaults() -> None:
    config = parse(Config, {"target": None, "drafters": None, "tasks": None})
    assert config == Config()


def test_none_is_accepted_only_where_the_schema_says_so() -> None:
    assert parse(EngineConfig, {"device_map": None}).device_map is None
    with pytest.raises(ConfigError, match="dtype"):
        parse(EngineConfig, {"dtype": None})


@pytest.mark.parametrize("section", ["http", "grpc", "dashboard"])
def test_an_ipv6_address_may_have_brackets(section: str) -> None:
    for written, host in (("[::1]", "::1"), ("::1", "::1"), ("[::]", "::"), ("0.0.0.0", "0.0.0.0")):
        assert getattr(config_with(**{section: {"host": written}}), section).host == host


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model_name = "other"  # type: ignore[misc]


def test_a_task_falls_back_to_the_default_list_and_then_to_every_drafter() -> None:
    drafters = {"a": {"kind": "lm"}, "b": {"kind": "prompt_lookup"}}
    every = config_with(drafters=drafters)
    assert every.drafters_of("code") == ("a", "b")
    listed = config_with(drafters=drafters, tasks={"default": ["b"], "code": ["a"]})
    assert listed.drafters_of("code") == ("a",)
    assert listed.drafters_of("unheard of") == ("b",)


def test_requests_may_name_no_class_that_goes_before_others_unless_the_operator_says_so() -> None:
    assert config_with().public_latency_classes == ("throughput",)
    allowed = config_with(ingress={"public_latency_classes": ["interactive"]})
    assert allowed.public_latency_classes == ("interactive",)


def test_the_minimal_configuration_obeys_the_rules() -> None:
    config_with().check()
    config_with().check_ports()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"target": {}}, "target.engine.model: no model is named"),
        ({"coordinator": {"max_running_sequences": 0}}, "must be at least 1"),
        (
            {"coordinator": {"replicas": 3, "max_running_sequences": 2}},
            "coordinator.replicas: 3 coordinators share the 2 places of coordinator.max_running",
        ),
        ({"coordinator": {"max_draft_tokens": -1}}, "coordinator.max_draft_tokens: -1 is out of"),
        ({"coordinator": {"target_timeout_s": float("nan")}}, "nan is out of range"),
        (
            {"coordinator": {"latency_classes": {"interactive": 0}}},
            "coordinator.latency_classes.interactive: 0 is out of range",
        ),
        (
            {"coordinator": {"latency_classes": {"a b": 2}}},
            "coordinator.latency_classes.a b: a class's name may hold",
        ),
        ({"coordinator": {"laws": []}}, "coordinator.laws: empty; name at least one"),
        ({"coordinator": {"laws": ["greedy"]}}, "coordinator.laws"),
        (
            {
                "coordinator": {"laws": ["coupled", "rejection"]},
                "target": {"engine": {"model": "m", "reproducible": True}},
            },
            "coordinator.laws: only coupled goes with target.engine.reproducible",
        ),
        *(
            ({section: {"host": host}}, f"{section}.host: {host!r} is no host: write an IP address")
            for section in ("http", "grpc", "dashboard")
            for host in ("256.1.1.1", "/tmp/socket", "http://127.0.0.1:8000", "", "[127.0.0.1]")
        ),
        (
            {"access": {"admin": {"host": "127.0.0.1:9"}}},
            "access.admin.host: '127.0.0.1:9' is no host",
        ),
        (
            {"ingress": {"traces_url": "collector:4318"}},
            "traces_url: 'collector:4318' is no address",
        ),
        ({"http": {"port": 70000}}, "http.port: 70000 is out of range; it must be between 1 and"),
        ({"ingress": {"replicas": 0}}, "ingress.replicas: 0 is out of range"),
        (
            {"ingress": {"segments": [f"s{number}" for number in range(33)]}},
            "ingress.segments: 33 names; name at most 32",
        ),
        (
            {"ingress": {"segments": ["web", "other"]}},
            "none of them `other`",
        ),
        (
            {"ingress": {"segments": ["a b"]}},
            "a segment's name may hold letters",
        ),
        (
            {"ingress": {"public_latency_classes": ["urgent"]}},
            "public_latency_classes: 'urgent' is no class; classes: throughput, interactive",
        ),
        (
            {"target": {"engine": {"model": "m"}, "placement": {"resources": {"slot": -1}}}},
            "target.placement.resources.slot: -1 is out of range",
        ),
        (
            {"target": {"engine": {"model": "m", "memory_fraction": 1.5}}},
            "target.engine.memory_fraction: 1.5 is out of range; it must be between 0.01 and 1",
        ),
        (
            {"target": {"engine": {"model": "m", "tensor_parallel": 2, "device_map": "auto"}}},
            "cannot be combined with tensor_parallel 2",
        ),
        (
            {"target": {"engine": {"model": "m", "adapters": {"a b": "/x"}}}},
            "target.engine.adapters.a b: an adapter's name may hold",
        ),
        (
            {"model_name": "m", "target": {"engine": {"model": "m", "adapters": {"m": "/x"}}}},
            "target.engine.adapters.m: an adapter's name may hold",
        ),
        (
            {"target": {"engine": {"model": "m", "adapters": {f"a{i}": "/x" for i in range(65)}}}},
            "target.engine.adapters: 65 adapters; at most 64 are served",
        ),
        ({"drafters": {"lm": {"kind": "lm", "replicas": 0}}}, "drafters.lm.replicas: 0 is out of"),
        ({"drafters": {"l m": {"kind": "lm"}}}, "drafters.l m: a drafter's name may hold"),
        (
            {"drafters": {"suffix": {"kind": "x"}}, "tasks": {"code": ["sufix"]}},
            "tasks.code: no drafter is named 'sufix' (did you mean suffix?)",
        ),
        ({"tasks": {"code": ["lm"]}}, "tasks.code: no drafter is named 'lm' (drafters: none)"),
        (
            {"drafters": {"lm": {"kind": "lm"}}, "tasks": {"code": ["lm", "lm"]}},
            "tasks.code: 'lm' stands twice; name it once",
        ),
    ],
)
def test_every_broken_rule_names_its_path_and_the_remedy(
    sections: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(**sections).check()
    assert message in caught.value.message


def test_two_servers_on_one_port_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"grpc\.port: 8123 is already http\.port"):
        config_with(http={"port": 8123}, grpc={"port": 8123}).check_ports()
    config_with(http={"port": 8265}, dashboard={"enabled": False}).check_ports()


SECTIONS = [kind for name, kind in vars(schema).items() if name.endswith(("Config", "Placement"))]
OPTIONS = [pkgutil.resolve_name(kind.options) for kind in KINDS.values()]


@pytest.mark.parametrize("kind", SECTIONS, ids=lambda kind: kind.__name__)
def test_the_defaults_of_a_section_are_in_its_ranges(kind: type) -> None:
    def plain(section: Any) -> Any:
        """`section` as it would stand in a file."""
        if not is_dataclass(section):
            return section
        return {key_of(field): plain(getattr(section, field.name)) for field in fields(section)}

    assert parse(kind, plain(kind())) == kind()


@pytest.mark.parametrize("kind", [*SECTIONS, *OPTIONS], ids=lambda kind: kind.__name__)
def test_every_number_of_the_schema_has_a_range(kind: type) -> None:
    def check(hint: Any) -> None:
        assert hint not in (int, float)
        if get_origin(hint) is not Annotated:
            for part in get_args(hint):
                check(part)

    for hint in get_type_hints(kind, include_extras=True).values():
        check(hint)
