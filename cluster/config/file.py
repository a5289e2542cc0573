"""Reads an ordinary Ray Serve config file, strictly, with overrides from the command line.

Serve itself ignores keys it does not know; here every key of the outer file is checked as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cluster.config.applications import is_pool, is_shared, with_deployments, with_pool
from cluster.config.parse import check_keys, check_that, is_text, mapping, parse
from cluster.config.references import check
from cluster.config.schema import Config
from cluster.errors import ConfigError
from cluster.models.names import served_name
from cluster.records import frozen

# The keys of Ray Serve's own schemas that we let through.
_FILE_KEYS = ("proxy_location", "logging_config", "applications")
_APPLICATION_KEYS = (
    "name",
    "route_prefix",
    "import_path",
    "runtime_env",
    "args",
    "deployments",
    "logging_config",
    "external_scaler_enabled",
    "autoscaling_policy",
)

# Keys of Serve's that are for its proxies, with the section of ours that replaces each.
_PROXIES: Mapping[str, str] = {"http_options": "http", "grpc_options": "grpc"}

_TEXT_TAG = "tag:yaml.org,2002:str"
_MERGE_TAG = "tag:yaml.org,2002:merge"
# YAML 1.1, which PyYAML and Ray Serve read, has octal, binary and sexagesimal numbers, 1.2 has not;
# and no number here is infinite.
_READ_IN_TWO_WAYS = re.compile(r"[:_]|^[-+]?0[0-9b]|inf|nan", re.IGNORECASE)


@frozen
class ServeFile:
    """A checked file.

    document: the Serve config as plain data, overrides applied, the target's application first.
    deployments: what it says of single ones, by their names; `config` contains their user_configs.
    """

    path: Path
    document: Mapping[str, Any]
    config: Config
    deployments: Mapping[str, Mapping[str, Any]]


def load(
    path: str | Path, overrides: Sequence[str] = (), document: dict[str, Any] | None = None
) -> ServeFile:
    """Read `path` and apply overrides of the form `target.engine.dtype=float32`.

    All keys are below applications[0].args.  Values are YAML, but for those of keys that have a
    text: it is taken as it stands, unless it is in quotes.  document: what a file would contain,
    where there is none and `path` is what errors name instead; the overrides change it.  Raises
    ConfigError with file and key path.
    """
    path = Path(path)
    with in_file(path):
        document = read_document(path) if document is None else document
        _check_proxies(document)
        check_keys(document, _FILE_KEYS)
        applications = _applications(document)
        document["applications"] = list(applications.values())
        for override in overrides:
            _override([application["args"] for application in applications.values()], override)
        (place, application), *pools = applications.items()
        prefix = application.get("route_prefix")
        check_that(
            prefix in (None, "/"),
            f"{place}.route_prefix",
            f"{prefix!r} is for Ray Serve's proxies; remove it",
        )
        config = parse_arguments(application["args"])
        config, deployments = with_deployments(config, application, place)
        for place, pool in pools:
            config, more = with_pool(config, pool, place)
            deployments |= more
        for name, where in config.elsewhere.items():
            raise ConfigError.at(
                f"drafters.{name}.placement.application",
                f"there is no application {where!r} in this file",
            )
        return ServeFile(path, document, config, deployments)


@contextmanager
def in_file(path: Path) -> Iterator[None]:
    """Inside, errors name the configuration file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", param=error.param) from error


def parse_arguments(arguments: Mapping[str, Any]) -> Config:
    """The `args` of the application, as Serve hands them to `deployments.app:build`."""
    config = parse(Config, arguments)
    name = config.model_name or served_name(config.target.engine.model)
    config = replace(config, model_name=name)
    check(config)
    return config


class _Loader(yaml.SafeLoader):
    """Refuses what PyYAML reads as another thing than people do: `no` and 12:30 as keys are False
    and 750, 0100 is 64, and of two equal keys the last one counts."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag not in (_TEXT_TAG, _MERGE_TAG):
                raise _refused(key, "is not a text to YAML, and keys are texts; put it in quotes")
            if key.value in seen:
                raise _refused(key, "stands twice as a key; remove one")
            seen.add(key.value)
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        is_number = node.tag.endswith((":int", ":float")) and _READ_IN_TWO_WAYS.search(node.value)
        if is_number or node.tag.endswith(":timestamp"):
            raise _refused(
                node,
                "is another value to YAML than it seems; put it in quotes, or "
                "write a number in decimal digits",
            )
        return node


def _refused(node: yaml.Node, reason: str) -> ConfigError:
    mark = node.start_mark
    what = node.value if isinstance(node, yaml.ScalarNode) else "this key"
    return ConfigError(f"line {mark.line + 1}, column {mark.column + 1}: {what} {reason}")


def _loaded(text: str) -> Any:
    """Read a YAML text; raises ConfigError with the place in it."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        if mark is None:
            raise ConfigError(f"not valid YAML: {error}") from error
        problem = getattr(error, "problem", None) or "it cannot be read"
        place = f"line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{place}: not valid YAML: {problem}; correct it") from error


def read_document(path: Path, example: str = "configs/own-model.yaml") -> dict[str, Any]:
    """Read the mapping in a YAML file.  example: where its form is shown.

    Raises ConfigError, without the file's name."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"not valid YAML: {error}") from error
    document = _loaded(text)
    if not isinstance(document, dict):
        what = "is empty" if document is None else "is not a mapping"
        raise ConfigError(f"the file {what}; see {example} for the form")
    return document


def _applications(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return copies of the file's applications, with their arguments, by the place of each; the
    target's is the first."""
    listed = document.get("applications", [])
    is_list = isinstance(listed, list) and 1 <= len(listed) <= 2
    check_that(is_list, "applications", "one application is expected, or two")
    found: dict[str, dict[str, Any]] = {}
    for number, each in enumerate(listed):
        place = f"applications[{number}]"
        found[place] = application = dict(mapping(each, place))
        check_keys(application, _APPLICATION_KEYS, place)
        application["args"] = dict(mapping(application.get("args"), f"{place}.args"))
    check_that(
        sum(map(is_pool, found.values())) == len(found) - 1,
        "applications",
        "one has import_path deployments.app:build, a second one deployments.app:build_pool",
    )
    return dict(sorted(found.items(), key=lambda each: is_pool(each[1])))


def _override(arguments: Sequence[dict[str, Any]], override: str) -> None:
    """Set the one key that `override` names.

    arguments: of every application, the target's first."""
    key, separator, text = map(str.strip, override.partition("="))
    parts = key.split(".")
    try:
        if not separator or not all(parts):
            raise ConfigError("expected key.path=value")
        is_as_it_stands = is_text(Config, parts) and not text.startswith(("'", '"'))
        value = text if is_as_it_stands else _loaded(text)
        for node in _places(arguments, parts):
            set_at(node, parts, value)
    except ConfigError as error:
        raise ConfigError(f"--set {override!r}: {error.message}", param=key) from error


def _places(arguments: Sequence[dict[str, Any]], parts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the arguments of those applications that a key is for."""
    of_target, *of_pools = arguments
    if parts[0] == "drafters":
        own = [each for each in of_pools if parts[1:] and parts[1] in (each.get("drafters") or {})]
        return own or [of_target]
    return [of_target, *(each for each in of_pools if is_shared(".".join(parts)))]


def set_at(node: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Set what stands at a path; raises ConfigError where what leads there is no mapping."""
    *sections, key = parts
    for section in sections:
        below = {} if node.get(section) is None else node[section]
        if not isinstance(below, dict):
            raise ConfigError(f"{section} is not a mapping")
        # A copy: YAML's aliases are one mapping in several places.
        node[section] = dict(below)
        node = node[section]
    node[key] = value


def _check_proxies(document: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys of Serve's proxies: the ingress listens itself."""
    for key, face in _PROXIES.items():
        check_that(
            not document.get(key),
            key,
            "for Ray Serve's proxies, and the ingress listens itself; remove it, and write host "
            f"and port into {face} below applications[0].args",
        )
    location = document.get("proxy_location") or "Disabled"
    check_that(
        location == "Disabled",
        "proxy_location",
        f"{location!r} starts Ray Serve's proxies, and the ingress listens itself, at http and "
        "grpc below applications[0].args; write Disabled",
    )
